import pytest
from owner_process import Owner

from reflux_transfer import handles
from reflux_transfer.errors import PeerGone, UnshareableRegion, WrongHandle
from reflux_transfer.registry import open_backend


def test_withdrawn_region_is_gone_although_mapped() -> None:
    backend, owner = open_backend("shm"), Owner("shm", 1000)
    try:
        remote, local = backend.open(owner.handle), backend.allocate(1000)
        backend.read(remote, 0, local, 0, 1000, 5.0)
        owner.withdraw()
        with pytest.raises(PeerGone, match="withdrawn"):
            backend.read(remote, 0, local, 0, 1000, 5.0)
        with pytest.raises(PeerGone):
            backend.open(owner.handle)
    finally:
        owner.close()
        backend.close()


def test_foreign_memory_cannot_be_described() -> None:
    backend = open_backend("shm")
    with pytest.raises(UnshareableRegion):
        backend.describe(backend.register(bytearray(10)))
    backend.close()


def test_a_handle_cannot_name_another_file() -> None:
    backend, owner = open_backend("shm"), Owner("shm", 1000)
    try:
        fields = handles.unseal(owner.handle, "shm")
        fields["fd"] = 0
        with pytest.raises(WrongHandle):
            backend.open(handles.seal("shm", {name: fields[name] for name in ("owner", "fd", "length", "token")}))
    finally:
        owner.close()
        backend.close()
