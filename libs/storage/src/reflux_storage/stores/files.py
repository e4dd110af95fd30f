"""Durable file-system steps that the folder store is made of."""

import os
from collections.abc import Iterator
from pathlib import Path


def write_all(descriptor: int, view: memoryview, offset_bytes: int) -> None:
    """Writes all of `view` (bytes) at `offset_bytes`."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset_bytes + done)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_empty_folders(folder: Path, top: Path) -> None:
    """Removes `folder` and its parents below `top` as long as they are empty."""
    while folder != top and folder.is_relative_to(top):
        try:
            folder.rmdir()
        except OSError:  # not empty, or gone
            return
        folder = folder.parent


def files_below(top: Path, prefix: str, skip: str | None = None) -> Iterator[str]:
    """Names, relative to `top`, of the files whose name starts with `prefix`; the folder `top/skip` is left out."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for folder, folders, files in os.walk(top / prefix.rpartition("/")[0], onerror=fail):
        if skip in folders and Path(folder) == top:
            folders.remove(skip)
        names = (str((Path(folder) / name).relative_to(top)) for name in files)
        yield from (name for name in names if name.startswith(prefix))
