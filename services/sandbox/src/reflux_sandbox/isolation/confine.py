"""Turns a freshly forked process into process 1 of its own namespaces, without rights, descriptors or a way out."""

import os
import resource
import select
import signal
import socket
from dataclasses import dataclass

from reflux_sandbox.isolation import kernel, landlock, seccomp, tree
from reflux_sandbox.isolation.base import ChildLimits

_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)


@dataclass(frozen=True)
class Cell:
    """What one child is given: its user id, its cgroups, its ceilings. One cell holds one child at a time."""

    number: int
    user_id: int
    """Own user id, so that limits per user are limits per child; inside a user namespace only a label."""
    in_user_namespace: bool
    writable: tuple[str, ...]
    """Folders that become private tmpfs mounts; the first is where work starts."""
    kept: tuple[str, ...]
    """Read-only folders of this Python below them that stay visible."""
    cgroup_procs: tuple[int, ...]
    """Open `cgroup.procs` files of the cell's cgroups."""
    proc_folder: int
    """Open descriptor of a /proc that shows the warm parent's pid namespace."""
    parent: int
    """A pidfd of the warm parent."""


def confine(cell: Cell, limits: ChildLimits, keep: set[int]) -> None:
    """Confines the caller, who must be the first process of a new pid namespace. Raises OSError naming the step.

    The order matters. Afterwards only `keep` is open; the caller cannot be traced by what it forks, and dies with the
    warm parent.
    """
    kernel.close_all_but(keep | {0, 1, 2, cell.proc_folder, cell.parent, *cell.cgroup_procs})
    os.setsid()
    for procs in cell.cgroup_procs:
        os.write(procs, b"0")
    kernel.unshare(_NAMESPACES)
    tree.mount_own_proc()
    owner = 0 if cell.in_user_namespace else cell.user_id
    tree.mount_private_folders(cell.writable, owner, limits.disk_bytes, limits.files, cell.kept)
    socket.sethostname("sandbox")
    set_ceilings(limits)
    _drop_user(cell)
    _die_with_parent(cell.parent)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    landlock.restrict(cell.writable, tree.WRITABLE_DEVICES)
    kernel.install_filter(seccomp.allow_list())
    kernel.close_all_but(keep | {0, 1, 2})


def set_ceilings(limits: ChildLimits, *, processes: bool = True) -> None:
    """rlimits that hold from the start; memory and cpu are set when the work arrives (`worker`)."""
    ceilings = [
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    if processes:
        ceilings.append((resource.RLIMIT_NPROC, limits.processes))
    for kind, value in ceilings:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_user(cell: Cell) -> None:
    if cell.in_user_namespace:
        # A user namespace per child counts its processes apart, and holds no rights over the namespaces made before it.
        outer = os.geteuid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        write_id_maps(cell.proc_folder, inside=65534, outside=outer)
        kernel.drop_capabilities()
        return
    os.setgroups([])
    os.setresgid(cell.user_id, cell.user_id, cell.user_id)
    os.setresuid(cell.user_id, cell.user_id, cell.user_id)


def write_id_maps(proc_folder: int, inside: int, outside: int) -> None:
    """Maps one user and group id of a new user namespace; `proc_folder` is an open /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside} {outside} 1"),
    ):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc_folder)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _die_with_parent(parent: int) -> None:
    """After setresuid, which clears the flag. A parent that died earlier is noticed here: it would send no signal."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([parent], [], [], 0)[0]:
        os._exit(1)
