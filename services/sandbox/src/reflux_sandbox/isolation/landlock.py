"""Landlock: the kernel's own rules on files, ports and scopes for a process that needs no right to set them.

A second wall behind the tree and the call filter: what a child may write or connect to holds even where a mount or the
filter has a hole. Source: Linux Documentation/userspace-api/landlock.rst (ABI 1 of Linux 5.13 to ABI 6 of 6.12).
"""

import ctypes
import os
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _DEVICE_CONTROL = (
    1 << 0,
    1 << 1,
    1 << 2,
    1 << 3,
    1 << 14,
    1 << 15,
)
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_CONTROL
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK = 3
"""bind and connect of TCP, from ABI 4 on."""
_SCOPES = 3
"""Abstract unix sockets and signals stay inside the domain, from ABI 6 on."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Version that this kernel speaks; 0 where it has none or it is switched off."""
    return max(0, _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG)))


def restrict(writable: Iterable[str], devices: Iterable[str] = ()) -> int:
    """From here on the caller and what it starts read and execute anything they see, and write only below `writable`.

    No TCP port, no abstract socket and no process outside. `devices` are single files that may be written. Needs
    no_new_privs. Returns the ABI in force, 0 for none; raises OSError when the kernel has Landlock and refuses.
    """
    version = abi()
    if version == 0:
        return 0
    handled = _ALL_BY_ABI[min(version, 5)]
    ruleset = _create(handled, version)
    try:
        _allow(ruleset, "/", (_EXECUTE | _READ_FILE | _READ_DIR) & handled)
        for folder in writable:
            _allow(ruleset, folder, handled)
        for device in devices:
            _allow(ruleset, device, (_OF_FILES & ~_EXECUTE) & handled)
        _checked(_libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0)))
    finally:
        os.close(ruleset)
    return version


def _create(handled: int, version: int) -> int:
    rules = _Ruleset(handled, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    call = (ctypes.c_long(_CREATE_RULESET), ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0))
    return _checked(_libc.syscall(*call))


def _allow(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(access, descriptor)
    call = (ctypes.c_long(_ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule))
    try:
        _checked(_libc.syscall(*call, ctypes.c_uint(0)))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
