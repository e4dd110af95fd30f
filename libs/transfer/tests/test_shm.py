import pytest
from owner_process import Owner

from reflux_transfer import handles
from reflux_transfer.errors import UnshareableRegion, WrongHandle
from reflux_transfer.registry import open_backend


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
