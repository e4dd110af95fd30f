"""Tensors from memory into one object: no temporary file, a bounded number of parts in flight, checksums on the way."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import xxhash

from reflux_storage.errors import StorageError, StoreUnavailable
from reflux_storage.layout import TensorSpec, build_head, file_order
from reflux_storage.stores.base import MultipartUpload, ObjectStore, PartReceipt

_MIB = 1 << 20


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: its dense bytes, or a call that brings them to host memory when their turn comes.

    The bytes must not change until the write has returned.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Callable[[], memoryview]


@dataclass(frozen=True)
class ObjectReceipt:
    """What a manifest must know about an object; `checksum` is the xxh3_128 of all its bytes, hexadecimal."""

    key: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class PartDone:
    """One stored part, for progress and traces."""

    key: str
    number: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How an object is cut and sent."""

    part_bytes: int | None = None
    """Size of a part, at least 5 MiB; None takes 8 MiB, or more for objects above 70 GB (parts are counted)."""

    connections: int = 4
    """Parts in flight; memory is bounded by twice as many parts."""

    part_deadline_seconds: float = 180.0
    """Longest wait for the next part to finish; bounds a stalled connection."""


def part_bytes_for(object_bytes: int) -> int:
    """8 MiB, or what keeps the object below 9,000 parts, in whole MiB."""
    return max(8 * _MIB, -(-object_bytes // 9000 // _MIB) * _MIB)


def write_tensors(
    store: ObjectStore,
    key: str,
    tensors: Iterable[TensorSource],
    options: StreamOptions | None = None,
    metadata: dict[str, str] | None = None,
    on_part: Callable[[PartDone], None] | None = None,
) -> ObjectReceipt:
    """Writes `tensors` as the object `key` (create-only; see `layout`) and returns what a manifest must know.

    The object appears at the end or not at all. Raises `AlreadyExists`, `StoreUnavailable` (a stalled part is named),
    and `ValueError` for a tensor whose bytes do not fit its shape. `metadata` goes into the safetensors header.
    """
    options = options or StreamOptions()
    sources = list(tensors)
    specs = [TensorSpec(source.name, source.dtype, tuple(source.shape)) for source in sources]
    order = file_order(specs)
    head = build_head([specs[i] for i in order], metadata)
    total = len(head) + sum(spec.size_bytes for spec in specs) + 16 * (1 + len(specs))
    part_bytes = options.part_bytes or part_bytes_for(total)
    whole = xxhash.xxh3_128()
    chunks = _chunks(head, [(specs[i], sources[i]) for i in order])
    parts = _cut(_hashed(chunks, whole), part_bytes)
    if total <= part_bytes:
        started = time.monotonic()
        store.put_create_only(key, next(parts))
        if on_part:
            on_part(PartDone(key, 1, total, time.monotonic() - started))
    else:
        upload = store.begin(key, part_bytes)
        _upload(store, upload, parts, _PartPool(store, upload, options, on_part))
    return ObjectReceipt(key, total, whole.hexdigest())


def _hashed(chunks: Iterator[memoryview], whole: xxhash.xxh3_128) -> Iterator[memoryview]:
    for chunk in chunks:
        whole.update(chunk)
        yield chunk


def _chunks(head: bytes, ordered: list[tuple[TensorSpec, TensorSource]]) -> Iterator[memoryview]:
    """The object's bytes in file order; the checksum table is made on the way."""
    table = bytearray(xxhash.xxh3_128_digest(head))
    yield memoryview(head)
    for spec, source in ordered:
        data = source.data() if callable(source.data) else source.data
        if data.nbytes != spec.size_bytes or not data.contiguous:
            want = f"{spec.dtype} {spec.shape} needs {spec.size_bytes} contiguous bytes"
            raise ValueError(f"tensor {spec.name}: {data.nbytes} bytes given, {want}")
        if data.nbytes:
            view = data.cast("B")
            table += xxhash.xxh3_128_digest(view)
            yield view
        else:
            table += xxhash.xxh3_128_digest(b"")
    yield memoryview(table)


def _cut(chunks: Iterator[memoryview], part_bytes: int) -> Iterator[memoryview]:
    """Cuts the byte sequence into parts; a part that lies inside one tensor is a view of it, not a copy."""
    pending = bytearray()
    for chunk in chunks:
        position = 0
        while position < len(chunk):
            if not pending and len(chunk) - position >= part_bytes:
                yield chunk[position : position + part_bytes]
                position += part_bytes
                continue
            taken = chunk[position : position + part_bytes - len(pending)]
            pending += taken
            position += len(taken)
            if len(pending) == part_bytes:
                yield memoryview(pending)
                pending = bytearray()
    if pending:
        yield memoryview(pending)


class _PartPool:
    """Parts of one upload in flight, at most `connections`; threads do the sending."""

    def __init__(
        self,
        store: ObjectStore,
        upload: MultipartUpload,
        options: StreamOptions,
        on_part: Callable[[PartDone], None] | None,
    ) -> None:
        self._store = store
        self._upload = upload
        self._options = options
        self._on_part = on_part
        self._threads = ThreadPoolExecutor(options.connections, thread_name_prefix="reflux-part")
        self._running: dict[Future[tuple[PartReceipt, float]], int] = {}
        self._receipts: list[PartReceipt] = []

    def send(self, number: int, part: memoryview) -> None:
        """Sends a part; waits for a place first."""
        if len(self._running) >= self._options.connections:
            self._collect()
        self._running[self._threads.submit(self._put, number, part)] = number

    def receipts(self) -> list[PartReceipt]:
        """Waits for all parts; their receipts in order."""
        while self._running:
            self._collect()
        return sorted(self._receipts, key=lambda receipt: receipt.number)

    def close(self) -> None:
        """A stalled thread ends by the store's own bounds; the caller does not wait for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _put(self, number: int, part: memoryview) -> tuple[PartReceipt, float]:
        started = time.monotonic()
        return self._store.put_part(self._upload, number, part), time.monotonic() - started

    def _collect(self) -> None:
        limit = self._options.part_deadline_seconds
        done, _ = wait(self._running, limit, FIRST_COMPLETED)
        if not done:
            late = f"parts {sorted(self._running.values())} of upload {self._upload.upload_id}"
            raise StoreUnavailable(f"{self._upload.key}: {late} did not finish within {limit:g} s")
        for future in done:
            del self._running[future]
            receipt, seconds = future.result()
            self._receipts.append(receipt)
            if self._on_part:
                self._on_part(PartDone(self._upload.key, receipt.number, receipt.size_bytes, seconds))


def _upload(store: ObjectStore, upload: MultipartUpload, parts: Iterator[memoryview], pool: _PartPool) -> None:
    finished = False
    try:
        for number, part in enumerate(parts, 1):
            pool.send(number, part)
        store.complete_create_only(upload, pool.receipts())
        finished = True
    finally:
        pool.close()
        if not finished:
            _drop(store, upload)


def _drop(store: ObjectStore, upload: MultipartUpload) -> None:
    """Aborts a failed upload; when the store is away, the checkpoint service's garbage collection does it later."""
    try:
        store.abort(upload.key, upload.upload_id)
    except StorageError:
        return
