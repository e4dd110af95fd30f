"""A folder store on a full disk: a typed error that says so, old objects as they were, no litter, and on again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from reflux_storage.errors import StoreUnavailable
from reflux_storage.stores.base import MIN_PART_BYTES
from reflux_storage.stores.folder import FolderStore

root = Path(sys.argv[1])
store = FolderStore(root)
before = store.put_create_only("kept", b"old")
used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
for write in (
    lambda: store.put_create_only("new", bytes(64 << 20)),
    lambda: store.put_if_match("kept", bytes(64 << 20), before.etag),
):
    try:
        write()
    except StoreUnavailable as error:
        print(error)
    else:
        raise SystemExit("64 MiB went onto a disk of 16")
assert store.get("kept")[0] == b"old"
assert [info.key for info in store.list("")] == ["kept"]
assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) == used, "half-written bytes are left"
store.put_create_only("new", bytes(1 << 20))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_a_typed_error_and_costs_nothing_that_was_stored(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=16m tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, sys.executable, ON_A_SMALL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device") == 2
