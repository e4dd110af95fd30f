import importlib.util
import os

import pytest

from reflux_transfer import handles
from reflux_transfer.errors import BackendUnavailable, PeerGone, WrongHandle
from reflux_transfer.registry import open_backend

NIXL = os.environ.get("REFLUX_TEST_NIXL") == "1"
needs_nixl = pytest.mark.skipif(
    not NIXL, reason="NIXL cases of all suites: REFLUX_TEST_NIXL=1 after deploy/bench/peers.sh"
)


@pytest.mark.skipif(bool(importlib.util.find_spec("nixl_cu12")), reason="NIXL is installed here")
def test_without_nixl_the_error_says_how_to_get_it() -> None:
    with pytest.raises(BackendUnavailable, match=r"pip install 'reflux-transfer\[nixl\]'"):
        open_backend("nixl")


@needs_nixl
def test_metadata_that_nixl_does_not_understand_is_a_wrong_handle() -> None:
    owner, reader = open_backend("nixl"), open_backend("nixl")
    try:
        fields = handles.unseal(owner.describe(owner.allocate(10)), "nixl")
        plain = {name: value for name, value in fields.items() if name not in ("format", "backend")}
        for wrong in ({"metadata": "00" * 40}, {"metadata": ""}, {"agent": "somebody else"}):
            with pytest.raises(WrongHandle):
                reader.open(handles.seal("nixl", {**plain, **wrong}))
        reader.release(reader.open(handles.seal("nixl", plain)))
    finally:
        reader.close()
        owner.close()


@needs_nixl
def test_memory_that_is_not_registered_cannot_be_read() -> None:
    owner, reader = open_backend("nixl"), open_backend("nixl")
    try:
        region, local = owner.allocate(4096), reader.allocate(4096)
        fields = handles.unseal(owner.describe(region), "nixl")
        plain = {name: value for name, value in fields.items() if name not in ("format", "backend")}
        remote = reader.open(handles.seal("nixl", {**plain, "address": region.address + 4096}))
        with pytest.raises(PeerGone):
            reader.read(remote, 0, local, 0, 4096, 5.0)
    finally:
        reader.close()
        owner.close()
