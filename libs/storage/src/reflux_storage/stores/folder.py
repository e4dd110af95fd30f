"""An object store in a directory: durable, safe across processes, nothing half-written after a kill -9.

Objects are plain files under `root`; `root/.reflux` holds the lock, files that are being written, and uploads. New
bytes are written and synced beside their place and appear by one `link` or `rename`. Changes of the name space happen
under one flock, which the kernel drops when its holder dies.
"""

import fcntl
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from reflux_storage.errors import AlreadyExists, InvalidKey, InvalidPart, NotFound, PreconditionFailed, StorageError
from reflux_storage.errors import StoreUnavailable as Unavailable
from reflux_storage.stores.base import (
    MAX_PARTS,
    MIN_PART_BYTES,
    MultipartUpload,
    ObjectInfo,
    ObjectStore,
    OpenUpload,
    PartReceipt,
    checked_key,
    checked_prefix,
)
from reflux_storage.stores.files import drop_empty_folders, files_below, sync_folder, write_all

_PRIVATE = ".reflux"
_LOCK_SECONDS = 20.0


class FolderStore(ObjectStore):
    """See the module; one instance may be shared by threads, one folder by processes of one machine."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._private = self._root / _PRIVATE
        self._writing = self._private / "writing"
        self._uploads = self._private / "uploads"
        try:
            for folder in (self._writing, self._uploads):
                folder.mkdir(parents=True, exist_ok=True)
            self._drop_dead_writes()
        except OSError as error:
            raise Unavailable(f"{root} cannot be used: {error.strerror or error}") from error

    def put_create_only(self, key: str, data: bytes | memoryview) -> ObjectInfo:
        """See `ObjectStore`."""
        path = self._path(key)
        with self._translated(key), self._written(data) as temporary, self._locked():
            self._make_folders(path.parent, self._root)
            info = _stamp(key, temporary, time.time_ns())
            self._link(temporary, path, key)
            return info

    def put_if_match(self, key: str, data: bytes | memoryview, etag: str) -> ObjectInfo:
        """See `ObjectStore`."""
        path = self._path(key)
        with self._translated(key), self._written(data) as temporary, self._locked():
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                raise PreconditionFailed(f"{key} does not exist") from None
            if _etag(found) != etag:
                raise PreconditionFailed(f"{key} has changed")
            # Strictly later than what it replaces, so that no two writes of a key share an etag.
            info = _stamp(key, temporary, max(time.time_ns(), found.st_mtime_ns + 1))
            temporary.replace(path)
            sync_folder(path.parent)
            return info

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore`."""
        with self._translated(key), self._path(key).open("rb") as file:
            return file.read(), _info(key, os.fstat(file.fileno()))

    def get_range(self, key: str, offset_bytes: int, into: memoryview) -> None:
        """See `ObjectStore`."""
        with self._translated(key), self._path(key).open("rb", buffering=0) as file:
            done = 0
            while done < len(into):
                count = os.preadv(file.fileno(), [into[done:]], offset_bytes + done)
                if count == 0:
                    raise NotFound(f"{key} ends before byte {offset_bytes + len(into)}")
                done += count

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        with self._translated(key):
            found = self._path(key).stat()
            if not stat.S_ISREG(found.st_mode):
                raise NotFound(f"{key} is no object")
            return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore`."""
        with self._translated(prefix):
            self._private.stat()
            found = sorted(files_below(self._root, checked_prefix(prefix), _PRIVATE))
        for key in found:
            with suppress(NotFound):  # deleted since
                yield self.head(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        path = self._path(key)
        with self._translated(key), self._locked():
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
                sync_folder(path.parent)
            drop_empty_folders(path.parent, self._root)

    def begin(self, key: str, part_bytes: int) -> MultipartUpload:
        """See `ObjectStore`."""
        if part_bytes < MIN_PART_BYTES:
            raise InvalidPart(f"{key}: parts of {part_bytes} bytes, the least is {MIN_PART_BYTES}")
        upload = MultipartUpload(checked_key(key), uuid.uuid4().hex, part_bytes)
        path = self._upload_path(key, upload.upload_id)
        with self._translated(key), self._locked():
            self._make_folders(path.parent, self._private)
            path.touch(exist_ok=False)
        return upload

    def put_part(self, upload: MultipartUpload, number: int, data: bytes | memoryview) -> PartReceipt:
        """See `ObjectStore`."""
        view = memoryview(data).cast("B")
        if not 1 <= number <= MAX_PARTS or not 0 < len(view) <= upload.part_bytes:
            raise InvalidPart(f"{upload.key}: part {number} of {len(view)} bytes")
        path = self._upload_path(upload.key, upload.upload_id)
        with (
            self._translated(upload.key, missing=f"upload {upload.upload_id} of {upload.key}"),
            path.open("r+b", buffering=0) as file,
        ):
            write_all(file.fileno(), view, (number - 1) * upload.part_bytes)
        return PartReceipt(number, len(view), f"{number}-{len(view)}")

    def complete_create_only(self, upload: MultipartUpload, parts: Sequence[PartReceipt]) -> ObjectInfo:
        """See `ObjectStore`."""
        size = _checked_parts(upload, parts)
        path, source = self._path(upload.key), self._upload_path(upload.key, upload.upload_id)
        with self._translated(upload.key, missing=f"upload {upload.upload_id} of {upload.key}"):
            with source.open("r+b") as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise InvalidPart(f"{upload.key}: stored parts do not add up to {size} bytes")
                os.fsync(file.fileno())
            with self._locked():
                self._make_folders(path.parent, self._root)
                info = _stamp(upload.key, source, time.time_ns())
                self._link(source, path, upload.key)
                source.unlink()
                drop_empty_folders(source.parent, self._uploads)
        return info

    def abort(self, upload_key: str, upload_id: str) -> None:
        """See `ObjectStore`."""
        path = self._upload_path(upload_key, upload_id)
        with self._translated(upload_key), self._locked():
            path.unlink(missing_ok=True)
            drop_empty_folders(path.parent, self._uploads)

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """See `ObjectStore`."""
        with self._translated(prefix):
            self._private.stat()
            found = sorted(files_below(self._uploads, checked_prefix(prefix)))
        for name in found:
            key, _, upload_id = name.rpartition("/")
            with suppress(FileNotFoundError):
                yield OpenUpload(key, upload_id, (self._uploads / name).stat().st_mtime)

    def check(self) -> None:
        """See `ObjectStore`."""
        with self._translated(str(self._root)), self._written(b"check"):
            pass

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _upload_path(self, key: str, upload_id: str) -> Path:
        if not (len(upload_id) == 32 and upload_id.isalnum()):
            raise NotFound(f"no upload {upload_id[:40]!r} of {key}")
        return self._uploads / checked_key(key) / upload_id

    @contextmanager
    def _translated(self, key: str, missing: str | None = None) -> Iterator[None]:
        """Turns the system's errors into the contract's."""
        try:
            yield
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if not self._private.is_dir():  # an unmounted store is not an empty one
                raise Unavailable(f"{self._root} is gone") from error
            raise NotFound(f"no {missing or f'object {key}'}") from None
        except OSError as error:
            raise Unavailable(f"{self._root}: {error.strerror or error}") from error

    @contextmanager
    def _written(self, data: bytes | memoryview) -> Iterator[Path]:
        """A synced file with `data`, beside the objects; its flock tells other processes that the writer lives."""
        path = self._writing / uuid.uuid4().hex
        descriptor = _open_owned(path)
        try:
            write_all(descriptor, memoryview(data).cast("B"), 0)
            os.fsync(descriptor)
            yield path
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _drop_dead_writes(self) -> None:
        """Removes what killed writers left; a living writer holds the flock of its file."""
        for path in self._writing.iterdir():
            with suppress(FileNotFoundError, BlockingIOError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._private / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Unavailable(f"{self._root} is locked for more than {_LOCK_SECONDS:.0f} s") from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(descriptor)

    def _make_folders(self, folder: Path, top: Path) -> None:
        """Creates what is missing between `top` and `folder`, each synced into its parent."""
        missing = [f for f in (folder, *folder.parents) if f.is_relative_to(top) and not f.is_dir()]
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileExistsError:
                raise InvalidKey(f"{path.relative_to(self._root)} is an object, so it cannot be a folder") from None
            sync_folder(path.parent)

    def _link(self, source: Path, path: Path, key: str) -> None:
        try:
            path.hardlink_to(source)
        except FileExistsError:
            if path.is_dir():
                raise InvalidKey(f"{key} is a folder of other objects") from None
            raise AlreadyExists(f"{key} exists") from None
        sync_folder(path.parent)


def _open_owned(path: Path) -> int:
    """Creates and locks `path`; tries again when a cleaner took it between the two."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _stamp(key: str, path: Path, modified_ns: int) -> ObjectInfo:
    """Sets the time that the etag is made of, before the file becomes visible."""
    os.utime(path, ns=(modified_ns, modified_ns))
    return _info(key, path.stat())


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)


def _checked_parts(upload: MultipartUpload, parts: Sequence[PartReceipt]) -> int:
    """The object's size; raises `InvalidPart` unless the parts are 1..n and all but the last are full."""
    numbers = [part.number for part in parts]
    full = all(part.size_bytes == upload.part_bytes for part in parts[:-1])
    if not parts or numbers != list(range(1, len(parts) + 1)) or not full:
        raise InvalidPart(f"{upload.key}: parts must be 1..n, all but the last of {upload.part_bytes} bytes")
    return sum(part.size_bytes for part in parts)
