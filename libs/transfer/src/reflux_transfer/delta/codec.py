"""Owns the format of a delta: XOR against a base, without unchanged blocks, its byte planes compressed. Lossless.

An optimizer step at a small learning rate changes few bfloat16 values (PULSE, arXiv 2602.03839: about 1 % of them), and
of those mostly the low byte. The XOR is zero elsewhere; low and high bytes side by side compress better than mixed.

Format, little-endian: magic u64, base fingerprint u64, length u64, frame bytes u32, block bytes u32; then per frame of
the weights: u32 length of its payload, bitmap of changed blocks, payload = zstd(low bytes, high bytes of the changed
blocks). An unchanged frame has an empty payload and an empty bitmap. Weights of any dtype survive; 2-byte ones shrink.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from reflux_transfer.errors import BaseMismatch, DeltaDamaged

_MAGIC = 0x3130_41544C455852  # "RXELTA01"
_HEAD = struct.Struct("<QQQII")
_LENGTH = struct.Struct("<I")
FRAME_BYTES = 1 << 20
MAX_DENSITY = 0.15
"""Share of changed elements above which a delta is not made: AdamW at lr 1e-5 changes about that much of bfloat16
weights, and the delta then costs more processor time than the bytes that it saves.
"""

BLOCK_BYTES = 4096
"""The unit of the bitmap. A smaller one helps little: at 2.4 % random changes half of all 64-byte blocks change."""


@dataclass(frozen=True)
class Encoded:
    """A delta of `length` bytes; `density` is the share of 2-byte elements that changed."""

    length: int
    density: float


def encode(
    base: memoryview,
    new: memoryview,
    out: memoryview,
    *,
    base_fingerprint: int,
    max_density: float = MAX_DENSITY,
    block_bytes: int = BLOCK_BYTES,
    level: int = 1,
    each_frame: Callable[[], None] = lambda: None,
) -> Encoded | None:
    """Writes `new` as its difference to `base` (same length) into `out`.

    `each_frame` is called ahead of every frame and may raise to end it. None when more than `max_density` of the
    elements changed or `out` is too small: dense weights are cheaper then.
    """
    if len(base) != len(new):
        raise ValueError(f"a delta is between weights of one size, not {len(base)} and {len(new)} bytes")
    _check_block(block_bytes, ValueError)
    if len(out) < _HEAD.size:
        return None
    frame = _Frame(block_bytes)
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    _HEAD.pack_into(out, 0, _MAGIC, base_fingerprint, len(new), FRAME_BYTES, block_bytes)
    elements = -(-len(new) // 2)
    at, changed, allowed = _HEAD.size, 0, max_density * elements
    for begin in range(0, len(new), FRAME_BYTES):
        each_frame()
        changed += frame.load(base[begin : begin + FRAME_BYTES], new[begin : begin + FRAME_BYTES])
        bitmap, planes = frame.split()
        payload = compressor.compress(planes) if len(planes) else b""
        needed = _LENGTH.size + (len(bitmap) + len(payload) if payload else 0)
        if changed > allowed or at + needed > len(out):
            return None
        _LENGTH.pack_into(out, at, len(payload))
        if payload:
            middle = at + _LENGTH.size + len(bitmap)
            out[at + _LENGTH.size : middle] = bitmap
            out[middle : at + needed] = payload
        at += needed
    return Encoded(at, changed / max(1, elements))


def decode(
    encoded: memoryview,
    base: memoryview,
    target: memoryview,
    *,
    base_fingerprint: int,
    each_frame: Callable[[], None] = lambda: None,
) -> None:
    """Rebuilds the weights in `target`, which may be `base` itself.

    `each_frame` is called ahead of every frame and may raise to end it. Raises `BaseMismatch` before it writes
    anything, `DeltaDamaged` with unknown bytes in the target. Whether the result is the published one is for its
    fingerprint to say.
    """
    reader = _Reader(encoded)
    magic, named, length, frame_bytes, block_bytes = _HEAD.unpack(reader.take(_HEAD.size))
    if magic != _MAGIC or frame_bytes != FRAME_BYTES:
        raise DeltaDamaged("the bytes are no delta of a known format")
    _check_block(block_bytes, DeltaDamaged)
    if named != base_fingerprint:
        raise BaseMismatch(f"the delta is against {named:016x}, the weights here are {base_fingerprint:016x}")
    if not length == len(base) == len(target):
        raise DeltaDamaged(f"the delta is of {length} bytes, the base has {len(base)}, the target {len(target)}")
    frame = _Frame(block_bytes)
    decompressor = zstandard.ZstdDecompressor()
    for begin in range(0, length, FRAME_BYTES):
        each_frame()
        old, place = base[begin : begin + FRAME_BYTES], target[begin : begin + FRAME_BYTES]
        (count,) = _LENGTH.unpack(reader.take(_LENGTH.size))
        if count:
            bitmap = reader.take(frame.bitmap_bytes(len(old)))
            frame.join(bitmap, len(old), _decompressed(decompressor, reader.take(count), frame.capacity(len(old))))
            frame.apply(old, place)
        else:
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(old, np.uint8))
    if reader.left:
        raise DeltaDamaged(f"{reader.left} bytes follow the end of the delta")


class _Frame:
    """Scratch memory for one frame, small enough to stay in the cache; the tail of a short one is zero."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._xor = np.zeros(FRAME_BYTES, np.uint8)
        self._planes = np.zeros(FRAME_BYTES, np.uint8)

    def bitmap_bytes(self, length: int) -> int:
        return -(-self._blocks(length) // 8)

    def capacity(self, length: int) -> int:
        """Most bytes that the planes of a frame can have."""
        return self._blocks(length) * self._block_bytes

    def load(self, base: memoryview, new: memoryview) -> int:
        """Takes the XOR of a frame; returns how many 2-byte elements of it changed."""
        self._length = len(new)
        self._xor[self._length : self.capacity(self._length)] = 0
        _xor(base, np.frombuffer(new, np.uint8), self._xor[: self._length])
        return int(np.count_nonzero(self._xor[: self.capacity(self._length)].view(np.uint16)))

    def split(self) -> tuple[bytes, memoryview]:
        """Bitmap of the changed blocks, and their low bytes followed by their high bytes."""
        blocks = self._xor[: self.capacity(self._length)].reshape(-1, self._block_bytes)
        changed = blocks.any(axis=1)
        pairs = (blocks if changed.all() else blocks[changed]).reshape(-1).view("<u2")
        # By shifts: twice as fast as strided bytes.
        np.copyto(self._planes[: len(pairs)], pairs, casting="unsafe")
        np.copyto(self._planes[len(pairs) : 2 * len(pairs)], pairs >> 8, casting="unsafe")
        return np.packbits(changed).tobytes(), self._planes.data[: 2 * len(pairs)]

    def join(self, bitmap: memoryview, length: int, planes: bytes) -> None:
        """The inverse of `split`. Raises `DeltaDamaged` when the two do not fit each other."""
        count = self._blocks(length)
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8))
        changed = bits[:count].astype(bool)
        if bits[count:].any() or int(changed.sum()) * self._block_bytes != len(planes):
            raise DeltaDamaged("a bitmap of changed blocks does not fit its payload")
        low, high = np.frombuffer(planes, np.uint8).reshape(2, -1)
        pairs = high.astype("<u2")
        np.left_shift(pairs, 8, out=pairs)
        np.bitwise_or(pairs, low, out=pairs)
        blocks = self._xor[: self.capacity(length)].reshape(-1, self._block_bytes)
        if len(planes) < blocks.size:
            blocks[~changed] = 0
        blocks[changed] = pairs.view(np.uint8).reshape(-1, self._block_bytes)

    def apply(self, base: memoryview, target: memoryview) -> None:
        """Writes base XOR frame."""
        _xor(base, self._xor[: len(target)], np.frombuffer(target, np.uint8))

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_bytes)


class _Reader:
    """Takes bytes from the front of a delta; too few are an error, whatever their number claims."""

    def __init__(self, encoded: memoryview) -> None:
        self._encoded, self._at = encoded, 0

    @property
    def left(self) -> int:
        return len(self._encoded) - self._at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise DeltaDamaged(f"the delta ends after {len(self._encoded)} bytes, {count - self.left} are missing")
        self._at += count
        return self._encoded[self._at - count : self._at]


def _decompressed(decompressor: Any, payload: memoryview, limit: int) -> bytes:
    try:
        # Looked at first: a size that a damaged frame merely claims would be allocated.
        size = zstandard.get_frame_parameters(payload).content_size
        if size > limit:
            raise DeltaDamaged(f"a frame claims {size} bytes, it has {limit} at most")
        return decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaDamaged(f"a frame does not decompress: {error}") from error


def _xor(left: memoryview, right: np.ndarray, out: np.ndarray) -> None:
    whole = len(out) // 8 * 8  # by words: 4-8 times as fast as by bytes
    ours = np.frombuffer(left, np.uint8)
    np.bitwise_xor(ours[:whole].view(np.uint64), right[:whole].view(np.uint64), out=out[:whole].view(np.uint64))
    np.bitwise_xor(ours[whole:], right[whole:], out=out[whole:])


def _check_block(block_bytes: int, error: type[ValueError]) -> None:
    if not 2 <= block_bytes <= FRAME_BYTES or FRAME_BYTES % block_bytes:
        raise error(f"a block has 2 to {FRAME_BYTES} bytes and divides the latter, not {block_bytes}")
