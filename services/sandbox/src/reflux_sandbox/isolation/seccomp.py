"""Builds seccomp filters as raw BPF: an allow-list for everything that runs in a child, and one that takes exec away.

Own code because libseccomp is not everywhere, and because a finished program of some kilobytes loads in microseconds.
"""

import errno
import platform
import struct

from reflux_sandbox.isolation import kernel, syscalls

_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000

_PRCTL_ALLOWED = (1, 3, 4, 15, 16, 21, 22, 23, 38, 39, 0x53564D41)
"""PDEATHSIG, dumpable, thread name, seccomp (can only be tightened), CAPBSET_READ, no_new_privs, SET_VMA (names)."""
_IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python's io layer asks."""
_AF_UNIX = 1


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when_true, when_false, value)


def _returning(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _refuse(code: int) -> bytes:
    return _returning(_ERRNO | code)


def _prologue(machine: str) -> bytes:
    """Kills foreign architectures (numbers would mean other calls) and the x32 interface; leaves the number loaded."""
    program = _instruction(_LOAD, _ARCHITECTURE) + _instruction(_EQUAL, syscalls.ARCHITECTURES[machine], 1, 0)
    program += _returning(_KILL_PROCESS) + _instruction(_LOAD, _NUMBER)
    if machine == "x86_64":
        program += _instruction(_AT_LEAST, _X32_BIT, 0, 1) + _returning(_KILL_PROCESS)
    return program


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as closed ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _when_any(numbers: list[int], verdict: int) -> bytes:
    program = b""
    for low, high in _ranges(numbers):
        if low == high:
            program += _instruction(_EQUAL, low, 0, 1)
        else:
            program += _instruction(_AT_LEAST, low, 0, 2) + _instruction(_ABOVE, high, 1, 0)
        program += _returning(verdict)
    return program


def _when(number: int, body: bytes) -> bytes:
    """`body` (ends with returns on every path) runs for this call only."""
    return _instruction(_EQUAL, number, 0, len(body) // 8) + body


def _first_argument_in(values: tuple[int, ...]) -> bytes:
    program = _instruction(_LOAD, _FIRST_ARGUMENT)
    for value in values:
        program += _instruction(_EQUAL, value, 0, 1) + _returning(_ALLOW)
    return program + _refuse(errno.EPERM)


def _second_argument_in(values: tuple[int, ...]) -> bytes:
    return _instruction(_LOAD, _FIRST_ARGUMENT + 8) + _first_argument_in(values)[8:]


def allow_list(machine: str | None = None) -> bytes:
    """The filter of every child: what `syscalls` does not list fails with EPERM, or kills. exec: see `without_exec`."""
    machine = machine or platform.machine()
    special = syscalls.special(machine)
    clone = _instruction(_LOAD, _FIRST_ARGUMENT) + _instruction(_ANY_BIT, kernel.CLONE_NEW_ANY, 0, 1)
    clone += _refuse(errno.EPERM) + _returning(_ALLOW)
    program = _prologue(machine)
    program += _when(special["clone"], clone)
    program += _when(special["clone3"], _refuse(errno.ENOSYS))  # its flags lie in memory: glibc falls back to clone
    program += _when(special["prctl"], _first_argument_in(_PRCTL_ALLOWED))
    program += _when(special["ioctl"], _second_argument_in(_IOCTL_ALLOWED))
    program += _when(special["socketpair"], _first_argument_in((_AF_UNIX,)))
    program += _when_any([*syscalls.plain(machine).values(), special["execve"], special["execveat"]], _ALLOW)
    program += _when_any(list(syscalls.killed(machine).values()), _KILL_PROCESS)
    return program + _refuse(errno.EPERM)


def without_exec(machine: str | None = None) -> bytes:
    """A second filter on top: no program may be started; for code that a model wrote and for plain verifiers."""
    machine = machine or platform.machine()
    special = syscalls.special(machine)
    program = _prologue(machine)
    for name in ("execve", "execveat"):
        program += _when(special[name], _refuse(errno.EPERM))
    return program + _returning(_ALLOW)
