"""The file system of a child: a read-only tmpfs with system libraries, this Python, and no data of the host."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from reflux_sandbox.isolation import kernel

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_ETC = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/alternatives",
    "/etc/python3",
    "/etc/python3.11",
    "/etc/python3.13",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_WORK_FOLDER = "/box"
WRITABLE = (_WORK_FOLDER, "/tmp", "/dev/shm")
_FORBIDDEN = ("/", "/etc", "/home", "/root", "/proc", "/sys", "/dev", "/run", "/var", "/tmp")
"""Never bound as a whole, even when they are on sys.path."""


def python_folders(extra: tuple[str, ...] = ()) -> list[str]:
    """Folders that this interpreter imports from (prefixes and sys.path) plus `extra`, outermost only."""
    wanted = {sys.prefix, sys.base_prefix, *sys.path, *extra}
    folders = sorted(
        {os.path.realpath(path) for path in wanted if path and Path(path).exists()} | {sys.prefix}, key=len
    )
    chosen: list[str] = []
    for folder in folders:
        inside = any(
            folder == outer or folder.startswith(outer.rstrip("/") + "/") for outer in (*chosen, "/usr", "/lib")
        )
        if not inside and folder not in _FORBIDDEN:
            chosen.append(folder)
    return chosen


def shown(extra: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Host paths that children see at the same place, each with its target when it is a symlink, else ""."""
    paths = [Path(path) for path in (*_SYSTEM, *_ETC, *python_folders(extra))]
    there = [path for path in paths if path.exists() or path.is_symlink()]
    return [(str(path), str(path.readlink()) if path.is_symlink() else "") for path in there]


def kept_below_writable(extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Folders of this Python that a private mount would hide (a checkout below /tmp)."""
    return tuple(path for path in python_folders(extra) if any(path.startswith(folder + "/") for folder in WRITABLE))


@dataclass(frozen=True)
class Tree:
    """Builds the tree below `new_root` (an empty folder) and enters it."""

    new_root: str
    extra_folders: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Shown again on top of the private mounts."""
        return kept_below_writable(self.extra_folders)

    def enter(self) -> None:
        """Replaces the caller's root; needs a mount namespace of its own. Nothing is writable afterwards."""
        self.build()
        kernel.mount("/proc", str(self._inside("/proc")), None, kernel.MS_BIND | kernel.MS_REC)
        kernel.make_tree_read_only(self.new_root)
        kernel.pivot_root_here(self.new_root)

    def build(self) -> None:
        """Mounts the tree at `new_root` in the caller's mount namespace, without /proc."""
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", self.new_root, "tmpfs", kernel.MS_NOSUID, "size=1m,nr_inodes=4096,mode=755")
        for path, _ in shown(self.extra_folders):
            self._show(path)
        self._make_devices()
        self._make_accounts()
        for folder in (*WRITABLE, "/proc"):
            self._inside(folder).mkdir(parents=True, exist_ok=True)

    def _inside(self, path: str) -> Path:
        return Path(self.new_root + path)

    def _show(self, path: str) -> None:
        """Shows a host path at the same place: symlinks as symlinks, folders and files as bind mounts."""
        source, target = Path(path), self._inside(path)
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
            return
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        kernel.mount(path, str(target), None, kernel.MS_BIND | kernel.MS_REC)

    def _make_devices(self) -> None:
        folder = self._inside("/dev")
        folder.mkdir()
        for name in _DEVICES:
            self._show(f"/dev/{name}")
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            (folder / name).symlink_to(target)

    def _make_accounts(self) -> None:
        self._inside("/etc").mkdir(exist_ok=True)
        self._inside("/etc/passwd").write_text("sandbox:x:65534:65534::/box:/bin/false\n")
        self._inside("/etc/group").write_text("sandbox:x:65534:\n")


def mount_private_folders(
    folders: tuple[str, ...], uid: int, disk_bytes: int, files: int, kept: tuple[str, ...] = ()
) -> None:
    """In a child's own mount namespace: `folders` become empty tmpfs mounts of `uid`, with caps; enters the first.

    `kept` are read-only folders below them that stay visible: held open over the mount, then bound again.
    """
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    held = [(os.open(path, os.O_PATH | os.O_DIRECTORY), path) for path in kept]
    for folder in folders:
        options = f"size={disk_bytes},nr_inodes={files},mode=700,uid={uid},gid={uid}"
        kernel.mount("tmpfs", folder, "tmpfs", flags, options)
    for descriptor, path in held:
        Path(path).mkdir(parents=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)
    os.chdir(folders[0])


def mount_own_proc() -> None:
    """A proc mount that shows the child's own pid namespace and, to each process, only itself."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", "/proc", "proc", flags, "hidepid=2,subset=pid")
