"""Raw memory: allocation, copies and reads of other processes, with the GIL released."""

import ctypes
import errno
import mmap
import os
import weakref
from itertools import dropwhile, islice
from pathlib import Path

import numpy as np

HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python 3.11's mmap has no name for it
_MAP_FIXED, _MAP_NORESERVE, _MAP_FIXED_NOREPLACE = (
    0x10,
    0x4000,
    0x100000,
)  # the same on x86-64 and aarch64; Python 3.11's mmap has no names for them
_MAP_FAILED = (1 << 64) - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memmove.restype = ctypes.c_void_p
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_places: dict[int, bool] = {}
"""Address of all living `private` memory, and whether its place is to be kept."""


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.POINTER(_IoVec), ctypes.c_ulong] * 2, ctypes.c_ulong]


def private(length: int) -> memoryview:
    """Zeroed private memory whose pages exist: a first read into it pays for no page fault.

    Huge pages where the kernel has them: process_vm_readv looks up every page that it touches, and took 2/3 of the
    processor time with huge pages on both sides (measured, 269 MB). Freed with its last view. Raises `MemoryError`.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    if address == _MAP_FAILED:
        raise MemoryError(f"no {length} bytes of memory: {os.strerror(ctypes.get_errno())}")
    owner = (ctypes.c_ubyte * length).from_address(address)
    _places[address] = False
    weakref.finalize(owner, _free, address, length).atexit = False  # others may still read while Python ends
    if length >= HUGE_PAGE:
        _libc.madvise(address, length, mmap.MADV_HUGEPAGE)  # may fail: 4 KiB pages do, too
    data = np.frombuffer(memoryview(owner), np.uint8)
    populate(data)
    return data.data


def keep_place(address: int) -> bool:
    """Never gives the addresses of the `private` memory that starts there to anything else.

    Its pages are freed with its last view, as ever; whoever still reads there finds zeros, neither the memory of others
    nor a fault. It costs address space only (2^47 bytes on x86-64). False when no private memory starts there.
    """
    if address not in _places:
        return False
    _places[address] = True
    return True


def block_place(address: int, length: int) -> None:
    """Puts zeros, which cost address space only, where memory was that is gone, unless something else is there now."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
    _libc.mmap(address, length, mmap.PROT_READ, kind, -1, 0)


def _free(address: int, length: int) -> None:
    if _places.pop(address):
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _libc.mmap(address, length, mmap.PROT_READ, kind, -1, 0)  # in one step: the place is never free
    else:
        _libc.munmap(address, length)


def populate(data: np.ndarray) -> None:
    """Gives every page of a writable mapping its place, without a page fault for each and without holding the GIL.

    `data`: u8 [bytes].
    """
    if _libc.madvise(data.ctypes.data, len(data), _POPULATE_WRITE) and ctypes.get_errno() == errno.EINVAL:
        data[:: mmap.PAGESIZE] |= 0  # a kernel before 5.14: touch them


def huge_share(address: int) -> float:
    """Which share of the shared memory that is mapped at `address` lies in huge pages; 0 where none is mapped."""
    size = ""
    with Path("/proc/self/smaps").open() as maps:
        at = dropwhile(lambda line: not line.startswith(f"{address:x}-"), maps)
        for name, _, value in (line.partition(":") for line in islice(at, 1, None)):
            if name == "Size":
                size = value
            elif name == "ShmemPmdMapped":
                return int(value.split()[0]) / int(size.split()[0])
    return 0.0


def copy(destination: int, source: int, count: int) -> None:
    """Copies `count` bytes between addresses; the caller keeps both ranges alive."""
    _libc.memmove(destination, source, count)


def read_process(pid: int, address: int, count: int) -> bytes | None:
    """`count` bytes of another process, None where the kernel does not let this one read them (cma)."""
    found = ctypes.create_string_buffer(count)
    ours, theirs = _IoVec(ctypes.addressof(found), count), _IoVec(address, count)
    done = _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    return found.raw if done == count else None
