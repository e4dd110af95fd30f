"""The contract of an object store: what every mechanism promises, and nothing that only one of them can do."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reflux_storage.errors import InvalidKey

_SEGMENT = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9_.=+@-]{0,199}")
_MAX_KEY = 800

MIN_PART_BYTES = 5 << 20
"""Smallest part but the last (S3's limit)."""
MAX_PARTS = 10_000
"""Most parts of one object (S3's limit)."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object as the store knows it; `etag` changes with every write, `modified_seconds` is Unix time."""

    key: str
    size_bytes: int
    etag: str
    modified_seconds: float


@dataclass(frozen=True)
class MultipartUpload:
    """An object that is being written; every part but the last has exactly `part_bytes` bytes."""

    key: str
    upload_id: str
    part_bytes: int


@dataclass(frozen=True)
class PartReceipt:
    """A stored part; `token` is what the store wants to see again when the upload completes."""

    number: int
    size_bytes: int
    token: str


@dataclass(frozen=True)
class OpenUpload:
    """An upload that has neither completed nor been aborted; Unix time of its start or last write."""

    key: str
    upload_id: str
    touched_seconds: float


class ObjectStore(ABC):
    """Keys are slash-separated segments; no key is a folder of another.

    Calls block, are bounded in time, and are safe in threads. All raise `InvalidKey` and `StoreUnavailable`; what a
    call that returned has written survives a kill -9 or a power cut right after.
    """

    @abstractmethod
    def put_create_only(self, key: str, data: bytes | memoryview) -> ObjectInfo:
        """Writes a whole object or raises `AlreadyExists`; readers see all of it or nothing."""

    @abstractmethod
    def put_if_match(self, key: str, data: bytes | memoryview, etag: str) -> ObjectInfo:
        """Replaces the object whose etag is `etag`, or raises `PreconditionFailed`."""

    @abstractmethod
    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """A small object's bytes with the etag that belongs to them, or raises `NotFound`."""

    @abstractmethod
    def get_range(self, key: str, offset_bytes: int, into: memoryview) -> None:
        """Fills `into` from `offset_bytes` on; raises `NotFound` when the object is missing or ends before."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """The object's size and etag, or raises `NotFound`."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The objects whose key starts with `prefix`, in order of their keys."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; a missing one is fine."""

    @abstractmethod
    def begin(self, key: str, part_bytes: int) -> MultipartUpload:
        """Starts an upload; nothing is visible under `key` until it completes."""

    @abstractmethod
    def put_part(self, upload: MultipartUpload, number: int, data: bytes | memoryview) -> PartReceipt:
        """Stores part `number` (from 1, any order, again replaces); raises `NotFound` for a finished upload."""

    @abstractmethod
    def complete_create_only(self, upload: MultipartUpload, parts: Sequence[PartReceipt]) -> ObjectInfo:
        """Makes the object appear, or raises `AlreadyExists` (the upload stays, abort it) or `NotFound`."""

    @abstractmethod
    def abort(self, upload_key: str, upload_id: str) -> None:
        """Drops an upload and its parts; a finished or unknown one is fine."""

    @abstractmethod
    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Open uploads whose key starts with `prefix`."""

    @abstractmethod
    def check(self) -> None:
        """Raises `StoreUnavailable` when the store cannot be used now; for start-up and readiness."""


def checked_key(key: str) -> str:
    """Returns `key`, or raises `InvalidKey` when some store could not hold it or would leave its folder."""
    if not key or len(key) > _MAX_KEY or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise InvalidKey(f"not a valid object key: {key[:80]!r} (segments of A-Z a-z 0-9 _ . = + @ -, no leading dot)")
    return key


def checked_prefix(prefix: str) -> str:
    """Returns `prefix` (empty, or a key, or a key and a slash), or raises `InvalidKey`."""
    if prefix:
        checked_key(prefix.removesuffix("/"))
    return prefix
