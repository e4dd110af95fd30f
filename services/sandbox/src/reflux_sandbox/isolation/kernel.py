"""Linux calls that Python lacks, through libc: namespaces, mounts, prctl, descriptors. A failure is an OSError."""

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEW_ANY = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 4096, 16384, 1 << 18, 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(platform.machine())
_MOUNT_SETATTR = 442
_CLOSE_RANGE = 436
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_MAX_DESCRIPTOR = 0x7FFFFFFF  # gVisor takes larger ones as negative


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Moves the caller into new namespaces (for the pid one: its next child)."""
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(descriptor: int, kind: int) -> None:
    """Joins the namespace behind `descriptor`; for pid namespaces this undoes an `unshare` for later children."""
    _checked(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    data = options.encode() if options is not None else None
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount {target}")


def detach(target: str) -> None:
    """umount2(2) with MNT_DETACH: gone from the tree at once, freed when unused."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_tree_read_only(target: str) -> None:
    """Makes `target` and every mount below it read-only and nosuid (mount_setattr, Linux 5.12)."""
    attributes = _MountAttributes(set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(result, f"mount_setattr {target}")


def pivot_root_here(new_root: str) -> None:
    """Makes `new_root` (a mount point) the root and drops the old one from the namespace."""
    if _PIVOT_ROOT is None:
        raise OSError(f"pivot_root: no system call number for {platform.machine()}")
    os.chdir(new_root)
    _checked(_libc.syscall(ctypes.c_long(_PIVOT_ROOT), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    arguments = [ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)]
    _checked(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(instructions: bytes) -> None:
    """Adds a seccomp filter (raw BPF, 8 bytes each) to the calling thread; needs no_new_privs or CAP_SYS_ADMIN."""
    program = _Program(len(instructions) // 8, instructions)
    result = _libc.prctl(ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    _checked(result, "seccomp")


def close_all_but(keep: set[int]) -> None:
    """Closes every descriptor that is not in `keep`, whatever it is and whoever opened it (close_range, Linux 5.9)."""
    first = 0
    for descriptor in sorted(keep):
        if descriptor > first:
            _close_range(first, descriptor - 1)
        first = descriptor + 1
    _close_range(first, _MAX_DESCRIPTOR)


def _close_range(first: int, last: int) -> None:
    result = _libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(0))
    _checked(result, "close_range")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


_CAPABILITY_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Empties the effective, permitted and inheritable sets (capset); needed where the user id does not change."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()), "capset")
