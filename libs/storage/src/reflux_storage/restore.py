"""From an object back into memory: ranged reads, small tensors together, every tensor verified."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from reflux_storage.errors import CorruptObject, NotFound
from reflux_storage.layout import CHECKSUM_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, Span, TensorSpec, parse_head
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import ObjectReceipt

_RANGE_BYTES = 16 << 20
_FIRST_READ_BYTES = 64 << 10


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of an object, where they lie, and their checksums (xxh3_128, 16 bytes)."""

    key: str
    spans: Mapping[str, Span]
    checksums: Mapping[str, bytes]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors in file order."""
        return [span.spec for span in self.spans.values()]


def read_index(store: ObjectStore, key: str) -> TensorIndex:
    """Reads and verifies header and checksum table; raises `NotFound`, `CorruptObject`, `StoreUnavailable`."""
    size = store.head(key).size_bytes
    start = _read(store, key, 0, min(size, _FIRST_READ_BYTES))
    head_bytes = LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little")
    if size < LENGTH_BYTES or head_bytes > min(size, MAX_HEADER_BYTES):
        raise CorruptObject(key, "no header")
    if head_bytes > len(start):
        start += _read(store, key, len(start), head_bytes - len(start))
    head = bytes(start[:head_bytes])
    *spans, table_span = parse_head(key, head, size)
    table = _read(store, key, table_span.offset_bytes, table_span.spec.size_bytes)
    rows = [bytes(table[i : i + CHECKSUM_BYTES]) for i in range(0, len(table), CHECKSUM_BYTES)]
    if xxhash.xxh3_128_digest(head) != rows[0]:
        raise CorruptObject(key, "header or checksum table differs from what was written")
    names = [span.spec.name for span in spans]
    return TensorIndex(key, dict(zip(names, spans, strict=True)), dict(zip(names, rows[1:], strict=True)))


def read_tensors(
    store: ObjectStore, index: TensorIndex, targets: Mapping[str, memoryview], connections: int = 4
) -> None:
    """Fills each target (dense, writable, exactly the tensor's bytes) and verifies it; names not asked for are not
    read.

    A tensor that differs is read once more (the wire may have been wrong), then `CorruptObject` names it. Raises
    `KeyError` for an unknown name and `ValueError` for a target of another size. On an error the targets hold anything.
    """
    views: dict[str, memoryview] = {}
    for name, target in targets.items():
        span = index.spans[name]
        if target.nbytes != span.spec.size_bytes or target.readonly or not target.contiguous:
            raise ValueError(f"target of {name}: want {span.spec.size_bytes} writable contiguous bytes")
        if target.nbytes:
            views[name] = target.cast("B")
    spans = sorted((index.spans[name] for name in views), key=lambda span: span.offset_bytes)
    with ThreadPoolExecutor(connections, thread_name_prefix="reflux-range") as pool:
        list(pool.map(lambda run: _read_run(store, index.key, run, views), _runs(spans)))
        list(pool.map(lambda name: _verify(store, index, name, views[name]), views))


def find_damage(store: ObjectStore, expected: ObjectReceipt, stop: Callable[[], bool] = lambda: False) -> str:
    """Reads an object back in bounded memory and says how it differs from what was written; "" when it does not.

    `stop` is asked before every range; when it returns true the scan ends with `InterruptedError`.
    """
    try:
        size = store.head(expected.key).size_bytes
        if size != expected.size_bytes:
            return f"{size} bytes instead of {expected.size_bytes}"
        whole = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_RANGE_BYTES, size)))
        for start in range(0, size, _RANGE_BYTES):
            if stop():
                raise InterruptedError(f"scan of {expected.key} was stopped")
            piece = buffer[: min(_RANGE_BYTES, size - start)]
            store.get_range(expected.key, start, piece)
            whole.update(piece)
    except NotFound:
        return "missing"
    return "" if whole.hexdigest() == expected.checksum else "bytes differ from what was written"


def _read(store: ObjectStore, key: str, offset_bytes: int, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    if size_bytes:
        store.get_range(key, offset_bytes, memoryview(data))
    return data


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Neighbours that fit one range; a tensor larger than a range is a run of its own."""
    run: list[Span] = []
    for span in spans:
        if run and (span.offset_bytes != run[-1].end_bytes or span.end_bytes - run[0].offset_bytes > _RANGE_BYTES):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _read_run(store: ObjectStore, key: str, run: list[Span], views: Mapping[str, memoryview]) -> None:
    if len(run) == 1:
        _read_span(store, key, run[0], views[run[0].spec.name])
        return
    start = run[0].offset_bytes
    data = memoryview(_read(store, key, start, run[-1].end_bytes - start))
    for span in run:
        views[span.spec.name][:] = data[span.offset_bytes - start : span.end_bytes - start]


def _read_span(store: ObjectStore, key: str, span: Span, view: memoryview) -> None:
    for start in range(0, len(view), _RANGE_BYTES):
        store.get_range(key, span.offset_bytes + start, view[start : start + _RANGE_BYTES])


def _verify(store: ObjectStore, index: TensorIndex, name: str, view: memoryview) -> None:
    if xxhash.xxh3_128_digest(view) == index.checksums[name]:
        return
    _read_span(store, index.key, index.spans[name], view)
    if xxhash.xxh3_128_digest(view) != index.checksums[name]:
        raise CorruptObject(index.key, f"tensor {name} differs from what was written")
