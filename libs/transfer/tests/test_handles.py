"""Handles: what is no handle, whose it is, and for which run and generation it holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_process import Owner

from reflux_transfer import handles
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import PeerGone, WrongHandle
from reflux_transfer.handles import Scope

OURS = Scope("run-1", 7, b"key of run-1")


def fields_of(handle: bytes, backend: str) -> dict:
    return {k: v for k, v in handles.unseal(handle, backend).items() if k not in ("format", "backend")}


def test_bytes_that_are_no_handle(backend: TransferBackend, owner: Owner) -> None:
    fields = fields_of(owner.handle, backend.name)
    broken = [
        b"",
        b"x",
        b"[]",
        b"null",
        b"{}",
        owner.handle[:-3],
        owner.handle + b" " * 20_000,
        handles.seal("other", fields),
    ]
    broken += [handles.seal(backend.name, {**fields, name: None}) for name in fields]
    broken += [
        handles.seal(backend.name, {**fields, "length": -1}),
        handles.seal(backend.name, {**fields, "owner": {"pid": 1}}),
    ]
    for handle in broken:
        with pytest.raises(WrongHandle):
            backend.open(handle)


def test_handle_of_a_reused_pid_is_gone(backend: TransferBackend, owner: Owner) -> None:
    fields = fields_of(owner.handle, backend.name)
    fields["owner"]["start_ticks"] += 1
    with pytest.raises(PeerGone):
        backend.open(handles.seal(backend.name, fields))


def test_a_handle_of_another_run_names_both_runs(backend: TransferBackend) -> None:
    region = backend.allocate(10)
    handle = backend.describe(region, OURS)
    with pytest.raises(WrongHandle, match=r"run 'run-1'.*run 'run-2'"):
        backend.open(handle, Scope("run-2"))
    with pytest.raises(WrongHandle, match="run ''"):
        backend.open(backend.describe(region), OURS)
    for scope in (OURS, Scope("run-1", 0, OURS.key), Scope("run-1"), None):
        backend.release(backend.open(handle, scope))


def test_another_generation_and_another_key_are_refused() -> None:
    handle = handles.seal("shm", {"length": 1}, OURS)
    with pytest.raises(WrongHandle, match="generation 7, expected is 8"):
        handles.unseal(handle, "shm", scope=Scope("run-1", 8, OURS.key))
    with pytest.raises(WrongHandle, match="not signed"):
        handles.unseal(handle, "shm", scope=Scope("run-1", 7, b"key of run-2"))
    with pytest.raises(WrongHandle, match="not signed"):
        handles.unseal(handles.seal("shm", {"length": 1}, Scope("run-1", 7)), "shm", scope=OURS)
    assert handles.unseal(handle, "shm", scope=OURS, length=int)["length"] == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0), st.integers(0, 255))
def test_no_changed_byte_passes_the_signature(position: int, value: int) -> None:
    handle = bytearray(handles.seal("shm", {"length": 12345, "token": "abcdef"}, OURS))
    position %= len(handle)
    if handle[position] == value:
        return
    handle[position] = value
    with pytest.raises(WrongHandle):
        handles.unseal(bytes(handle), "shm", scope=OURS)
