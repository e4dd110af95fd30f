import threading
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from reflux_transfer.arena import PublisherArenas, ReplicaArenas
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import ArenasBusy, ChecksumMismatch, LayoutError, ReadCancelled, ReadDeadlineExceeded
from reflux_transfer.layout import Layout
from reflux_transfer.pull import Slice, fingerprint, pull

LAYOUT = Layout.from_shapes({"big": ([1000, 3], "float32"), "scalar": ([], "float32"), "half": ([5], "bfloat16")})
SLICE = 4096


def tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    big = rng.standard_normal((1000, 3), np.float32)
    return {
        "big": big,
        "scalar": np.float32(seed) * np.ones((), np.float32),
        "half": rng.integers(0, 256, 10, np.uint8),
    }


@pytest.fixture
def backend() -> Iterator[ShmBackend]:
    opened = ShmBackend()
    yield opened
    opened.close()


@pytest.fixture
def arenas(backend: ShmBackend) -> PublisherArenas:
    return PublisherArenas(backend, LAYOUT, SLICE)


def plan(arenas: PublisherArenas, checksums: tuple[int, ...]) -> list[Slice]:
    pieces = zip(LAYOUT.pieces(SLICE), checksums, strict=True)
    return [Slice(p.slot.name, p.slot.offset + p.start, p.slot.offset + p.start, p.length, c) for p, c in pieces]


def test_staged_weights_arrive_verified(arenas: PublisherArenas, backend: ShmBackend) -> None:
    weights, replica = tensors(1), ReplicaArenas(LAYOUT)
    staged = arenas.stage(weights)
    remote, local = backend.open(staged.handle), replica.shadow_region(backend)
    report = pull(backend, remote, local, plan(arenas, staged.checksums), deadline_seconds=10)
    assert (report.bytes, report.slices) == (LAYOUT.parameter_bytes, len(staged.checksums))
    for slot in LAYOUT.slots:
        assert bytes(replica.buffers[1][slot.offset : slot.end]) == weights[slot.name].tobytes()
    expected = xxhash.xxh3_64_intdigest(b"".join(weights[slot.name].tobytes() for slot in LAYOUT.slots))
    assert fingerprint(replica.buffers[1], LAYOUT) == expected
    replica.swap()
    assert replica.live_index == 1
    assert replica.shadow_region(backend).view == replica.buffers[0]


def test_training_on_does_not_change_what_readers_see(arenas: PublisherArenas) -> None:
    weights = tensors(1)
    staged = arenas.stage(weights)
    before = bytes(arenas.view(staged.generation))
    weights["big"] += 1
    assert bytes(arenas.view(staged.generation)) == before


def test_flipped_bit_names_the_slice(arenas: PublisherArenas, backend: ShmBackend) -> None:
    staged = arenas.stage(tensors(1))
    slot = LAYOUT.by_name["half"]
    arenas.view(staged.generation)[slot.offset + 3] ^= 0x10
    with pytest.raises(ChecksumMismatch, match="half") as caught:
        pull(
            backend,
            backend.open(staged.handle),
            backend.allocate(LAYOUT.region_bytes),
            plan(arenas, staged.checksums),
            deadline_seconds=9,
        )
    assert caught.value.slice_name == "half"


def test_pull_ends_when_cancelled_or_late(arenas: PublisherArenas, backend: ShmBackend) -> None:
    staged = arenas.stage(tensors(1))
    remote, local = backend.open(staged.handle), backend.allocate(LAYOUT.region_bytes)
    with pytest.raises(ReadCancelled):
        pull(backend, remote, local, plan(arenas, staged.checksums), deadline_seconds=9, cancelled=lambda: True)
    with pytest.raises(ReadDeadlineExceeded):
        pull(backend, remote, local, plan(arenas, staged.checksums), deadline_seconds=-1)


def test_the_committed_generation_stays_while_others_come_and_go(arenas: PublisherArenas) -> None:
    first = arenas.stage(tensors(1))
    arenas.pin(first.generation)
    committed = bytes(arenas.view(first.generation))
    for seed in (2, 3, 4):  # aborted ones
        staged = arenas.stage(tensors(seed))
        arenas.lease(staged.generation, "sync", 60)
        arenas.release(staged.generation, "sync")
        assert bytes(arenas.view(first.generation)) == committed
    last = arenas.stage(tensors(5))
    arenas.pin(last.generation)
    arenas.stage(tensors(6))
    with pytest.raises(KeyError):
        arenas.view(first.generation)


def test_both_arenas_leased_names_the_holders(arenas: PublisherArenas) -> None:
    arenas.pin(arenas.stage(tensors(1)).generation)
    second = arenas.stage(tensors(2))
    arenas.lease(second.generation, "engine-0", 60)
    with pytest.raises(ArenasBusy, match="committed version, engine-0"):
        arenas.stage(tensors(3))


def test_a_waiting_stage_gets_the_arena_when_a_lease_ends(arenas: PublisherArenas) -> None:
    arenas.pin(arenas.stage(tensors(1)).generation)
    second = arenas.stage(tensors(2))
    arenas.lease(second.generation, "engine-0", 60)
    arenas.lease(second.generation, "engine-1", 0.05)  # this one expires by itself
    threading.Timer(0.02, arenas.release, (second.generation, "engine-0")).start()
    assert arenas.stage(tensors(3), deadline_seconds=20).generation == second.generation + 1


def test_tensors_that_do_not_fit_are_named(arenas: PublisherArenas) -> None:
    weights = tensors(1)
    with pytest.raises(LayoutError, match=r"missing \['big'\].*unexpected \['bigger'\]"):
        arenas.stage({"bigger": weights["big"], "scalar": weights["scalar"], "half": weights["half"]})
    with pytest.raises(LayoutError, match="big has 4000 bytes"):
        arenas.stage({**weights, "big": weights["big"][:, 0].copy()})
    with pytest.raises(LayoutError, match="big"):
        arenas.stage({**weights, "big": weights["big"].T})
    assert arenas.stage(weights).generation == 1
