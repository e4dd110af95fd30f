"""Places in memory: given back when nobody may read there, kept where somebody may."""

import ctypes
import os

import numpy as np
import pytest

from reflux_transfer import memory

MIB = 1 << 20


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_that_ends_goes_back_to_the_system() -> None:
    view = memory.private(MIB)
    view[:6] = b"secret"
    address, part = address_of(view), view[MIB - 1 :]
    del view
    part[0] = 1  # a view of a part keeps the whole
    assert memory.read_process(os.getpid(), address, 6) == b"secret"
    del part
    again = [memory.private(MIB) for _ in range(20)]
    assert any(abs(address_of(view) - address) < 20 * MIB for view in again)
    assert memory.keep_place(address) is (address in map(address_of, again))


def test_a_kept_place_reads_as_zeros_and_is_never_given_away() -> None:
    view = memory.private(MIB)
    view[:6] = b"secret"
    address = address_of(view)
    assert memory.keep_place(address)
    assert bytes(view[:6]) == b"secret"
    del view
    others = [memory.private(MIB) for _ in range(20)]
    assert all(abs(address_of(other) - address) >= MIB for other in others)
    assert ctypes.string_at(address, MIB) == bytes(MIB)
    assert not memory.keep_place(address)


def test_no_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="memory"):
        memory.private(1 << 60)
