"""Raw memory operations that release the GIL."""

import ctypes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memmove.restype = ctypes.c_void_p
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.POINTER(_IoVec), ctypes.c_ulong] * 2, ctypes.c_ulong]


def copy(destination: int, source: int, count: int) -> None:
    """Copies `count` bytes between addresses; the caller keeps both ranges alive."""
    _libc.memmove(destination, source, count)


def can_read_process(pid: int, address: int) -> bool:
    """Whether the kernel lets this process read that memory (cma): reads one byte."""
    byte = ctypes.create_string_buffer(1)
    ours, theirs = _IoVec(ctypes.addressof(byte), 1), _IoVec(address, 1)
    return _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 1
