import contextlib
import struct
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import WatchedShm

from reflux_transfer.arenas.geometry import HEADER_BYTES
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.delta.codec import FRAME_BYTES, MAX_DENSITY, Encoded, decode, encode
from reflux_transfer.errors import (
    BaseMismatch,
    ChecksumMismatch,
    DeltaDamaged,
    GenerationGone,
    ReadCancelled,
    ReadDeadlineExceeded,
)
from reflux_transfer.layout import Layout
from reflux_transfer.pulling import source
from reflux_transfer.pulling.difference import Base, follow_delta
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import RemoteSource

NAN, MINUS_ZERO, INFINITY = 0x7FC1, 0x8000, 0x7F80
SIZES = st.sampled_from([1, 2, 3, 7, 4095, 4096, 4097, 70_001, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 4099])


def view(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array)).cast("B")


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, as uint16."""
    words = values.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def encoded(base: memoryview, new: memoryview, fingerprint: int = 7, **options) -> memoryview | None:
    out = memoryview(bytearray(2 * len(new) + 4096))
    found = encode(base, new, out, base_fingerprint=fingerprint, **{"max_density": 1.0, **options})
    return out[: found.length] if found else None


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(0, 40), st.sampled_from([2, 512, 4096, FRAME_BYTES]), st.integers(0, 1 << 30))
def test_what_is_decoded_is_what_was_encoded(size: int, changes: int, block_bytes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, size, np.uint8)
    new = base.copy()
    new[rng.integers(0, size, changes)] = rng.integers(0, 256, changes, np.uint8)
    packed = encoded(view(base), view(new), block_bytes=block_bytes)
    assert packed is not None
    target = memoryview(bytearray(size))
    decode(packed, view(base), target, base_fingerprint=7)
    assert target == view(new)
    held = memoryview(bytearray(view(base)))
    decode(packed, held, held, base_fingerprint=7)  # in place
    assert held == view(new)


def test_every_bit_pattern_of_bfloat16_survives() -> None:
    base = np.arange(1 << 16, dtype=np.uint16)
    new = base.copy()
    new[:8] = [NAN, 0xFFC1, 0x7F81, MINUS_ZERO, INFINITY, 0xFF80, 1, 0x8001]
    new[NAN], new[MINUS_ZERO], new[0x4000] = 0, 0, NAN
    packed = encoded(view(base), view(new))
    assert packed is not None
    target = memoryview(bytearray(len(view(new))))
    decode(packed, view(base), target, base_fingerprint=7)
    assert target == view(new)
    assert encoded(view(new), view(new)) is not None


def test_a_step_at_lr_1e_6_costs_less_than_5_percent_of_the_bytes() -> None:
    """w ~ N(0, 0.02^2), |dw| in [0.2, 1] * lr: what AdamW does to bfloat16 weights at that learning rate."""
    rng = np.random.default_rng(0)
    count = 1 << 20
    weights = (rng.standard_normal(count) * 0.02).astype(np.float32)
    step = (rng.uniform(0.2, 1, count) * rng.choice([-1, 1], count) * 1e-6).astype(np.float32)
    base, new = bfloat16(weights), bfloat16(weights + step)
    out = memoryview(bytearray(2 * count))
    found = encode(view(base), view(new), out, base_fingerprint=1)
    assert found is not None
    assert 0.01 < found.density < 0.04
    assert found.length <= 0.05 * 2 * count


def test_frames_do_not_leak_into_each_other() -> None:
    base = np.zeros(4 * FRAME_BYTES, np.uint8)
    new = base.copy()
    for frame in (0, 1, 3):  # another block in each, none in the third
        new[frame * FRAME_BYTES + 4096 * frame] = 1 + frame
    packed = encoded(view(base), view(new))
    assert packed is not None
    target = memoryview(bytearray(len(base)))
    decode(packed, view(base), target, base_fingerprint=7)
    assert target == view(new)


def test_equal_weights_cost_a_few_bytes_per_frame() -> None:
    same = view(np.arange(1 << 20, dtype=np.uint16))
    packed = encoded(same, same)
    assert packed is not None
    assert len(packed) == 32 + 4 * len(same) // FRAME_BYTES


def test_dense_changes_and_a_small_output_fall_back() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 100_000).astype(np.uint16)
    for share, fits in ((MAX_DENSITY - 0.01, True), (MAX_DENSITY + 0.01, False)):
        new = base.copy()
        new[: int(share * len(base))] ^= 1
        found = encode(view(base), view(new), memoryview(bytearray(200_000)), base_fingerprint=1)
        assert (found is not None) == fits
    new = base ^ rng.integers(0, 1 << 16, 100_000).astype(np.uint16)
    for room in (0, 31, 32, 100, 150_000):
        assert encode(view(base), view(new), memoryview(bytearray(room)), base_fingerprint=1, max_density=1) is None


def test_a_wrong_base_is_refused_before_anything_is_written() -> None:
    base, new = view(np.zeros(5000, np.uint8)), view(np.ones(5000, np.uint8))
    packed = encoded(base, new, fingerprint=0xABC)
    target = memoryview(bytearray(5000))
    with pytest.raises(BaseMismatch, match=f"{0xABC:016x}, the weights here are {0xDEF:016x}"):
        decode(packed, base, target, base_fingerprint=0xDEF)
    assert not any(target)


@pytest.mark.parametrize("frames", [0, 1])
def test_both_ways_may_be_ended_ahead_of_every_frame(frames: int) -> None:
    base, packed = sample()
    target, calls = memoryview(bytearray(len(base))), list[int]()

    def each_frame() -> None:
        calls.append(len(calls))
        if len(calls) > frames:
            raise TimeoutError("given up")

    with pytest.raises(TimeoutError, match="given up"):
        decode(packed, base, target, base_fingerprint=7, each_frame=each_frame)
    assert any(target) == (frames > 0)
    assert not any(target[FRAME_BYTES:])
    calls.clear()
    with pytest.raises(TimeoutError, match="given up"):
        encoded(base, base, each_frame=each_frame)
    assert len(calls) == frames + 1


def test_bad_arguments_are_refused() -> None:
    zeros = view(np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="one size"):
        encode(zeros, zeros[:99], zeros, base_fingerprint=1)
    for block_bytes in (0, 1, 3, 2 * FRAME_BYTES):
        with pytest.raises(ValueError, match="a block has"):
            encode(zeros, zeros, zeros, base_fingerprint=1, block_bytes=block_bytes)


def sample() -> tuple[memoryview, memoryview]:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, FRAME_BYTES + 9000, np.uint8)
    new = base.copy()
    new[rng.integers(0, len(new), 400)] ^= 5
    packed = encoded(view(base), view(new))
    assert packed is not None
    return view(base), packed


def test_a_truncated_delta_is_an_error_wherever_it_ends() -> None:
    base, packed = sample()
    target = memoryview(bytearray(len(base)))
    for length in (0, 1, 31, 32, 35, 40, len(packed) // 2, len(packed) - 1):
        with pytest.raises(DeltaDamaged, match="missing"):
            decode(packed[:length], base, target, base_fingerprint=7)
    with pytest.raises(DeltaDamaged, match="3 bytes follow"):
        decode(memoryview(bytes(packed) + b"abc"), base, target, base_fingerprint=7)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_garbage_is_a_typed_error_or_decodes_to_something(data: st.DataObject) -> None:
    """Never another exception, never a read outside: what decodes to wrong weights is for the fingerprint to find."""
    base, packed = SAMPLE
    broken = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DeltaDamaged, BaseMismatch):
        decode(memoryview(broken), base, memoryview(bytearray(len(base))), base_fingerprint=7)


SAMPLE = sample()


def test_a_frame_that_claims_a_huge_size_is_not_believed() -> None:
    base, packed = sample()
    at = 32 + 4 + FRAME_BYTES // 4096 // 8
    assert bytes(packed[at : at + 4]) == b"\x28\xb5\x2f\xfd"  # the magic of zstd
    descriptor = bytes([0xE0]) + struct.pack("<Q", 1 << 60)  # single segment, 8 bytes of content size
    broken = bytes(packed[: at + 4]) + descriptor + bytes(packed[at + 13 :])
    with pytest.raises(DeltaDamaged, match="claims"):
        decode(memoryview(broken), base, memoryview(bytearray(len(base))), base_fingerprint=7)


LAYOUT = Layout.from_shapes({"w": ([1000, 80], "bfloat16"), "b": ([77], "bfloat16")})


class Pair:
    """A publisher that has room for deltas and a replica, with one version in common."""

    def __init__(self) -> None:
        self.backend = WatchedShm()
        self.arenas = PublisherArenas(self.backend, LAYOUT, delta_share=0.2)
        self.replica = ReplicaArenas(LAYOUT, backend=self.backend)
        rng = np.random.default_rng(0)
        self.weights = {
            "w": bfloat16(rng.standard_normal((1000, 80), np.float32)),
            "b": bfloat16(rng.standard_normal(77, np.float32)),
        }
        self.base = self.arenas.begin()
        self.base.write(self.weights)
        self.arenas.pin(self.base.generation)
        self.pull(self.base)
        self.replica.swap()

    def next(self, share: float = 0.02) -> Staging:
        """A version in which some elements changed, staged with its difference."""
        changed = int(80_000 * share)
        self.weights = {**self.weights, "w": self.weights["w"].copy()}
        self.weights["w"].reshape(-1)[:: 80_000 // changed] ^= 1
        staging = self.arenas.begin()
        staging.write(self.weights, base=self.base.generation)
        return staging

    def pull(self, staging: Staging, fingerprint: int | None = None, **options: Any) -> PullReport:
        remote = RemoteSource(self.backend.open(staging.offer()), staging.generation)
        named = self.arenas.fingerprint(self.base.generation) if fingerprint is None else fingerprint
        base = Base(LAYOUT, self.replica.view(self.replica.live_index), named)
        local = self.replica.shadow_region(self.backend)
        return follow_delta(self.backend, remote, local, base, **{"deadline_seconds": 20, **options})

    def assert_same(self, staging: Staging) -> None:
        shadow = self.replica.view(self.replica.shadow_index)
        assert bytes(shadow) == bytes(self.arenas.view(staging.generation))


def test_a_delta_arrives_bit_for_bit_in_few_bytes() -> None:
    pair = Pair()
    staging = pair.next()
    assert isinstance(staging.delta, Encoded)
    report = pair.pull(staging)
    pair.assert_same(staging)
    assert report.bytes == staging.delta.length < 0.05 * LAYOUT.parameter_bytes
    assert report.fingerprint == pair.arenas.fingerprint(staging.generation)
    again = pair.pull(staging)  # the same version twice
    pair.assert_same(staging)
    assert again.fingerprint == report.fingerprint


def test_a_version_that_is_too_dense_for_a_delta_is_pulled_in_full() -> None:
    pair = Pair()
    staging = pair.next(share=0.5)
    assert staging.delta is None
    report = pair.pull(staging)
    pair.assert_same(staging)
    assert report.bytes >= LAYOUT.parameter_bytes


def test_a_replica_with_another_base_is_refused_and_may_pull_in_full() -> None:
    pair = Pair()
    staging = pair.next()
    before = bytes(pair.replica.view(pair.replica.shadow_index))
    with pytest.raises(BaseMismatch):
        pair.pull(staging, fingerprint=0)
    assert bytes(pair.replica.view(pair.replica.shadow_index)) == before


def test_a_base_with_the_right_name_and_wrong_bytes_is_noticed() -> None:
    pair = Pair()
    staging = pair.next()
    pair.replica.view(pair.replica.live_index)[LAYOUT.by_name["b"].offset] ^= 1
    with pytest.raises(DeltaDamaged, match="b is"):
        pair.pull(staging)


def test_a_base_that_is_gone_fails_the_staging() -> None:
    pair = Pair()
    staging = pair.arenas.begin()
    with pytest.raises(KeyError):
        staging.write(pair.weights, base=99)
    with pytest.raises(GenerationGone, match="KeyError"):
        pair.pull(staging)


def test_no_delta_is_made_for_a_generation_that_was_failed() -> None:
    pair = Pair()
    staging, named = pair.arenas.begin(), pair.arenas.fingerprint

    def fails_on_the_way(generation: int) -> int:
        staging.fail("aborted by the broker")
        return named(generation)

    pair.arenas.fingerprint = fails_on_the_way
    with pytest.raises(GenerationGone, match="aborted by the broker"):
        staging.write(pair.weights, base=pair.base.generation)
    assert staging.delta is None


def test_a_flipped_bit_on_the_way_is_noticed_before_it_is_applied() -> None:
    pair = Pair()
    staging = pair.next()
    assert staging.delta
    before, expected = bytes(pair.replica.view(pair.replica.shadow_index)), staging.delta.length
    read = pair.backend.read

    def flipping(remote, remote_offset, local, local_offset, length, seconds) -> None:
        read(remote, remote_offset, local, local_offset, length, seconds)
        if length == expected:
            local.view[length // 2] ^= 4

    pair.backend.read = flipping
    with pytest.raises(ChecksumMismatch, match="the delta"):
        pair.pull(staging)
    assert bytes(pair.replica.view(pair.replica.shadow_index)) == before


@pytest.mark.parametrize("asked", [1, 2, 3, 4])
def test_a_pull_of_a_delta_ends_when_cancelled(asked: int) -> None:
    """While it is read, while its one frame is applied, and while each of two tensors is verified."""
    pair = Pair()
    staging, left = pair.next(), iter(range(asked - 1))
    before = bytes(pair.replica.view(pair.replica.shadow_index))
    with pytest.raises(ReadCancelled, match="before the end of the delta"):
        pair.pull(staging, cancelled=lambda: next(left, None) is None)
    assert (bytes(pair.replica.view(pair.replica.shadow_index)) == before) == (asked <= 2)


def test_a_delta_is_not_applied_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    staging, later = pair.next(), iter([0.0, 60.0])
    before = bytes(pair.replica.view(pair.replica.shadow_index))

    def passes() -> bool:
        now = time.monotonic() + next(later)
        monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now))
        return False

    with pytest.raises(ReadDeadlineExceeded, match="the end of the delta"):
        pair.pull(staging, cancelled=passes)
    assert bytes(pair.replica.view(pair.replica.shadow_index)) == before


def test_a_generation_overwritten_before_its_checksums_were_read_is_gone_not_damaged() -> None:
    pair = Pair()
    staging, taken = pair.next(), []

    def before(offset: int, length: int) -> None:
        if offset == HEADER_BYTES and length == 16 and not taken:
            taken.append(pair.arenas.begin().write({name: words + 1 for name, words in pair.weights.items()}))

    pair.backend.before = before
    with pytest.raises(GenerationGone, match="overwritten"):
        pair.pull(staging)
    assert taken
