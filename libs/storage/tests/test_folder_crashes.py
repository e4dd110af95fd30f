"""A folder store whose writer is killed with SIGKILL: objects are whole or absent, and nothing is left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reflux_storage.errors import NotFound, StoreUnavailable
from reflux_storage.restore import read_index
from reflux_storage.stores import open_store
from reflux_storage.stores.base import MIN_PART_BYTES
from reflux_storage.stores.folder import FolderStore

WRITER = """
import os, signal, sys
from reflux_storage.stores.folder import FolderStore
from reflux_storage.stream import StreamOptions, TensorSource, write_tensors
from pathlib import Path

countdown = int(sys.argv[3])
EVENTS = {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.utime", "os.rmdir", "fcntl.flock"}
armed = False

def step():
    # Every system call of the writer that changes a file is a place to die at.
    global countdown
    countdown -= armed
    if armed and countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def half_write(descriptor, data, offset, write=os.pwrite):
    half = len(data) // 2
    write(descriptor, data[:half], offset)
    step()
    return half + write(descriptor, data[half:], offset + half)

def sync(descriptor, fsync=os.fsync):
    step()
    fsync(descriptor)

os.pwrite, os.fsync = half_write, sync
store = FolderStore(Path(sys.argv[1]))
sys.addaudithook(lambda event, args: step() if event in EVENTS else None)
armed = True
if sys.argv[2] == "put":
    store.put_create_only("a/b/new", b"n" * 100_000)
elif sys.argv[2] == "swap":
    store.put_if_match("latest", b"2" * 100_000, store.head("latest").etag)
else:
    data = memoryview(bytes(range(256)) * (11 * 4096))
    write_tensors(store, "a/big", [TensorSource("t", "U8", (len(data),), data)], StreamOptions(part_bytes=5 << 20))
armed = False
"""


def writer_killed_at(root: Path, job: str, step: int) -> bool:
    """Runs a writer that kills itself at its `step`-th file operation; False when it finished before."""
    command = [sys.executable, "-c", WRITER, str(root), job, str(step)]
    ended = subprocess.run(command, timeout=60, capture_output=True, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
    return ended.returncode != 0


def leftovers(root: Path) -> list[Path]:
    """Files of the private folder besides the lock."""
    return [path for path in (root / ".reflux").rglob("*") if path.is_file() and path.name != "lock"]


@pytest.mark.parametrize("job", ["put", "swap", "stream"])
def test_a_writer_killed_at_any_step_leaves_whole_objects_and_no_litter(tmp_path: Path, job: str) -> None:
    step, killed, seen = 0, True, set()
    while killed:
        step += 1
        root = tmp_path / str(step)
        FolderStore(root).put_create_only("latest", b"1" * 50_000)
        killed = writer_killed_at(root, job, step)
        store = FolderStore(root)
        for upload in store.list_uploads(""):
            store.abort(upload.key, upload.upload_id)
        assert leftovers(root) == []
        seen.add(_state(store, job))
        store.put_if_match("latest", b"3", store.head("latest").etag)  # the lock is free
    assert step > 8
    assert len(seen) == 2, "the write was seen both before and after it took effect"


def _state(store: FolderStore, job: str) -> str:
    """What a reader sees; fails on anything half-written."""
    if job == "swap":
        data = store.get("latest")[0]
        assert data in (b"1" * 50_000, b"2" * 100_000)
        return data[:1].decode()
    try:
        if job == "put":
            assert store.get("a/b/new")[0] == b"n" * 100_000
        else:
            assert read_index(store, "a/big").specs[0].size_bytes == 11 << 20
    except NotFound:
        assert [info.key for info in store.list("")] == ["latest"]
        return "absent"
    return "whole"


@contextmanager
def stopped_writer(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A living writer that has opened its file and waits in the middle of the write."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom reflux_storage.stores.folder import FolderStore\n"
        "store = FolderStore(Path(sys.argv[1]))\n"
        "with store._written(b'x'):\n    print('writing', flush=True)\n    sys.stdin.readline()\n"
    )
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code, str(root)], stdin=pipe, stdout=pipe, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        yield child
    finally:
        child.kill()
        child.wait(10)


def test_the_file_of_a_living_writer_is_not_cleaned_away_but_that_of_a_dead_one_is(tmp_path: Path) -> None:
    with stopped_writer(tmp_path) as child:
        FolderStore(tmp_path)
        assert len(leftovers(tmp_path)) == 1
        child.kill()
        child.wait(10)
        FolderStore(tmp_path)
        assert leftovers(tmp_path) == []


def test_a_store_that_was_taken_away_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.put_create_only("k", b"1")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for call in (
        store.check,
        lambda: store.get("k"),
        lambda: store.head("k"),
        lambda: list(store.list("")),
        lambda: list(store.list_uploads("")),
        lambda: store.put_create_only("k2", b""),
        lambda: store.begin("k2", MIN_PART_BYTES),
    ):
        with pytest.raises(StoreUnavailable):
            call()


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        open_store(f"file://{tmp_path}/file/store")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(StoreUnavailable):
            open_store(f"file://{tmp_path}/closed/store")


@pytest.mark.parametrize("url", ["", "store", "file://", "file:///", "file://host/x", "s3://", "ftp://x/y"])
def test_other_addresses_are_refused_with_what_would_work(url: str) -> None:
    with pytest.raises(ValueError, match="file:///folder or s3://bucket/prefix"):
        open_store(url)
