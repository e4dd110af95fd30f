"""The layout of a tensor object: a valid safetensors file whose last tensor holds the checksums of the others.

    u64 little-endian N | N bytes of JSON header | tensors without gaps | checksum table

The table is the U8 tensor `reflux.xxh3` of shape [1 + tensors, 16]: row 0 is the xxh3_128 of everything before the
first tensor, row i that of the i-th tensor in file order. The table itself is covered by the checksum of the whole
object, which the writer returns. Format: safetensors' documentation (header size, alignment of the start to 8 bytes, no
holes).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from reflux_storage.errors import CorruptObject

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
CHECKSUM_BYTES = 16
TABLE = "reflux.xxh3"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The bound that safetensors' own reader has."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (a safetensors name) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Span:
    """A tensor and where its first byte is in the object."""

    spec: TensorSpec
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        """Offset just behind the tensor."""
        return self.offset_bytes + self.spec.size_bytes


def checked_spec(spec: TensorSpec) -> TensorSpec:
    """Returns `spec`, or raises `ValueError` when no object can hold it."""
    if not spec.name or spec.name in (TABLE, "__metadata__"):
        raise ValueError(f"not a tensor name: {spec.name!r}")
    if spec.dtype not in DTYPE_BYTES or any(size < 0 for size in spec.shape):
        raise ValueError(f"tensor {spec.name}: dtype {spec.dtype!r}, shape {spec.shape}")
    return spec


def file_order(specs: Sequence[TensorSpec]) -> list[int]:
    """Indices of `specs` as they lie in the object: wide dtypes first, so that every tensor is aligned."""
    names = [checked_spec(spec).name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("two tensors have the same name")
    return sorted(range(len(specs)), key=lambda i: -DTYPE_BYTES[specs[i].dtype])


def build_head(ordered: Sequence[TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Length and header for tensors in file order, the checksum table included."""
    table = TensorSpec(TABLE, "U8", (1 + len(ordered), CHECKSUM_BYTES))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for spec in (*ordered, table):
        end = position + spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def parse_head(key: str, head: bytes, object_bytes: int) -> tuple[Span, ...]:
    """Spans in file order, the table last; raises `CorruptObject` unless they fill the object without gaps."""
    try:
        header = json.loads(head[LENGTH_BYTES:])
        header.pop("__metadata__", None)
        spans = sorted((_span(name, entry, len(head)) for name, entry in header.items()), key=_position)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptObject(key, "unreadable header") from error
    position = len(head)
    for span in spans:
        if span.offset_bytes != position:
            raise CorruptObject(key, f"tensor {span.spec.name} does not follow the one before")
        position = span.end_bytes
    if position != object_bytes:
        raise CorruptObject(key, f"header describes {position} bytes, the object has {object_bytes}")
    if not spans or spans[-1].spec != TensorSpec(TABLE, "U8", (len(spans), CHECKSUM_BYTES)):
        raise CorruptObject(key, "no checksum table")
    return tuple(spans)


def _position(span: Span) -> tuple[int, int]:
    return span.offset_bytes, span.end_bytes


def _span(name: str, entry: dict[str, object], start: int) -> Span:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or not all(type(n) is int for n in shape + offsets):
        raise ValueError(name)
    spec = TensorSpec(name, str(entry["dtype"]), tuple(shape))
    if name != TABLE:
        checked_spec(spec)
    if offsets[1] - offsets[0] != spec.size_bytes:
        raise ValueError(name)
    return Span(spec, start + offsets[0])
