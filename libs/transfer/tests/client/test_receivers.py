"""Receivers and routes without a broker: offers go straight from a publisher's arenas to a replica's."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from reflux_transfer.arenas.geometry import Packing
from reflux_transfer.arenas.packing import packing
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import (
    PACKED,
    Kind,
    Offer,
    Prepared,
    Route,
    SourceRegion,
    Update,
    is_packed,
    layout_of_rank,
)
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Receiver
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.errors import GenerationGone, ReadCancelled, ReadDeadlineExceeded, WrongHandle
from reflux_transfer.handles import Scope
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend
from reflux_weightplan.errors import PlanRefused
from reflux_weightplan.expand import Expander
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.plan import plan, plan_hash
from reflux_weightplan.spec import SpecLayout, TensorSpec
from reflux_weightplan.wire import layout_hash

SHAPES = {"rows": (64, 96), "columns": (64, 96), "norm": (33,)}
LAYOUT = Layout.from_shapes({name: (shape, "float32") for name, shape in SHAPES.items()})
SPEC = single_rank(LAYOUT)


@pytest.fixture
def backend() -> Iterator[TransferBackend]:
    opened = open_backend("shm")
    yield opened
    opened.close()


def parallel(ranks: int, *, rows_only: bool = False) -> SpecLayout:
    """One tensor cut along rows, one along columns in runs of a few hundred bytes, one on every rank.

    With `rows_only` all are cut along rows, the short one unevenly.
    """
    rows = Placement((Cut(0, "t"),))
    cuts = {"rows": rows, "columns": Placement((Cut(1, "t"),)), "norm": Placement()}
    cuts = dict.fromkeys(cuts, rows) if rows_only else cuts
    tensors = tuple(TensorSpec(name, SHAPES[name], "float32", cut) for name, cut in cuts.items())
    return SpecLayout(Mesh((("t", ranks),)), tensors)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def part(tensors: dict[str, np.ndarray], ranks: int, rank: int) -> dict[str, np.ndarray]:
    """What a rank of `parallel(ranks)` holds."""
    return {
        "rows": np.array_split(tensors["rows"], ranks, 0)[rank],
        "columns": np.ascontiguousarray(np.array_split(tensors["columns"], ranks, 1)[rank]),
        "norm": tensors["norm"],
    }


def found(view: memoryview, layout: Layout) -> dict[str, np.ndarray]:
    return {slot.name: np.frombuffer(view[slot.offset : slot.end], np.float32) for slot in layout.slots}


def equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(ours[name].reshape(-1), theirs[name].reshape(-1)) for name in theirs)


def offer(
    regions: list[SourceRegion], route: Route, epoch: int = 1, kind: Kind = "full", seconds: float = 20.0
) -> Offer:
    return Offer(epoch, epoch, kind, tuple(regions), route, time.monotonic() + seconds, seconds)


def publish(
    arenas: PublisherArenas,
    tensors: dict[str, np.ndarray],
    rank: int = 0,
    base: int | None = None,
    packings: Sequence[Packing] = (),
) -> SourceRegion:
    staging = arenas.begin(packings=packings)
    staging.write(tensors, base=base)
    arenas.pin(staging.generation)
    return SourceRegion(rank, staging.offer(Scope("r")), arenas.transport, staging.generation, staging.plans)


async def take(receiver: Receiver, offered: Offer) -> tuple[Prepared, Prepared]:
    """Prepares and commits; what was prepared and what is served."""

    async def apply(update: Update) -> float:
        if update.fill:
            update.fill()
        return 2.0

    prepared = await receiver.prepare(offered, lambda: False)
    served, pause_ms = await receiver.commit(prepared, apply)
    assert pause_ms == 2.0
    return prepared, served


@pytest.mark.parametrize(("giving", "taking"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
async def test_every_rank_gets_its_part_from_any_other_division(
    backend: TransferBackend, giving: int, taking: int
) -> None:
    source, target = parallel(giving), parallel(taking)
    publishers = [PublisherArenas(backend, layout_of_rank(source, rank)) for rank in range(giving)]
    tensors, seen = weights(), set()
    regions = [publish(arenas, part(tensors, giving, rank), rank) for rank, arenas in enumerate(publishers)]
    for rank in range(taking):
        layout = layout_of_rank(target, rank)
        receiver = SwapReceiver(ReplicaArenas(layout, backend=backend), rank=rank, scope=Scope("r"))
        prepared, _ = await take(receiver, offer(regions, Route(source, target, rank)))
        assert equal(found(receiver.arenas.view(receiver.arenas.live_index), layout), part(tensors, taking, rank))
        seen.add(prepared.fingerprint)
    assert len(seen) == 1, "ranks of one version have one fingerprint"


@pytest.mark.parametrize("taking", [2, 8])
async def test_packed_pieces_spare_the_bytes_that_nobody_wants(backend: TransferBackend, taking: int) -> None:
    source, target = parallel(2, rows_only=True), parallel(taking)
    planned, tensors = plan(source, target, PACKED), weights()
    regions = []
    for rank in range(2):
        arenas = PublisherArenas(backend, layout_of_rank(source, rank))
        extras = packing(planned.hash, Expander(planned).pieces(rank), arenas.layout)
        halves = {name: np.array_split(value, 2, 0)[rank] for name, value in tensors.items()}
        regions.append(publish(arenas, halves, rank, packings=[extras]))
    assert is_packed(regions, layout_hash(source), layout_hash(target))
    for packed in (False, True):
        read, needed, seen = 0, 0, set()
        for rank in range(taking):
            layout = layout_of_rank(target, rank)
            receiver = SwapReceiver(ReplicaArenas(layout, backend=backend), rank=rank, scope=Scope("r"))
            offered = offer(regions, Route(source, target, rank, packed=packed))
            prepared, _ = await take(receiver, offered)
            assert equal(found(receiver.arenas.view(receiver.arenas.live_index), layout), part(tensors, taking, rank))
            read, needed = read + prepared.report.bytes, needed + layout.parameter_bytes
            seen.add(prepared.fingerprint)
        assert len(seen) == 1
        assert read == needed if packed else read > 0.7 * taking * needed, (read, needed)


def test_sources_that_pack_for_others_or_in_part_are_read_by_the_plan_that_packs_nothing() -> None:
    name = plan_hash("source", "target", PACKED)
    with_it, without = (SourceRegion(0, b"", "shm", 1, plans) for plans in (("x", name), ("x",)))
    assert is_packed([with_it, with_it], "source", "target")
    assert not is_packed([with_it, without], "source", "target")
    assert not is_packed([with_it], "source", "another target")


def test_the_two_copies_of_a_shard_share_the_work() -> None:
    """HSDP: a mesh of two copies of two shards; every rank of the target reads by itself, and nobody tells them who."""
    shards = Placement((Cut(0, "shard", "chunk"),))
    tensors = tuple(TensorSpec(f"w{number}", (64, 96), "float32", shards) for number in range(8))
    source = SpecLayout(Mesh((("copy", 2), ("shard", 2))), tensors)
    columns = Placement((Cut(1, "t"),))
    target = SpecLayout(Mesh((("t", 2),)), tuple(TensorSpec(t.name, t.shape, t.dtype, columns) for t in tensors))
    for packed in (False, True):
        read = Counter[int]()
        for rank in range(2):
            for move in Route(source, target, rank, packed=packed).moves:
                read[move.source_rank] += move.runs * move.run_bytes
        assert sorted(read) == [0, 1, 2, 3]
        assert set(read.values()) == {source.nbytes // 4}


def test_layouts_that_do_not_go_together_have_no_route() -> None:
    with pytest.raises(PlanRefused, match="more"):
        Route(SPEC, single_rank(Layout.from_shapes({"more": ([3], "float32")})), 0)


@pytest.mark.parametrize("kind", [SwapReceiver, InPlaceReceiver])
async def test_a_replica_serves_on_what_it_took(backend: TransferBackend, kind: type) -> None:
    region = publish(PublisherArenas(backend, LAYOUT), weights())
    route = Route(SPEC, SPEC, 0)
    receivers = []
    for _ in range(3):  # a chain: each reads from the one before
        arenas = ReplicaArenas(LAYOUT, buffers=1 if kind is InPlaceReceiver else 2, backend=backend)
        receivers.append(kind(arenas, scope=Scope("r")))
        _, served = await take(receivers[-1], offer([region], route))
        (region,) = served.regions
        assert equal(found(arenas.view(arenas.live_index), LAYOUT), weights())
    assert len({receiver.arenas.view(receiver.arenas.live_index).tobytes() for receiver in receivers}) == 1
    with pytest.raises(KeyError):
        receivers[0].arenas.lease(9, "x", 1.0)
    receivers[0].arenas.lease(1, "x", 1.0)


@pytest.mark.parametrize("kind", [SwapReceiver, InPlaceReceiver])
async def test_a_delta_moves_less_and_ends_in_the_same_bits(backend: TransferBackend, kind: type) -> None:
    publisher = PublisherArenas(backend, LAYOUT, delta_share=1.0)
    arenas = ReplicaArenas(LAYOUT, buffers=1 if kind is InPlaceReceiver else 2, backend=backend)
    receiver, route, tensors = kind(arenas, scope=Scope("r")), Route(SPEC, SPEC, 0), weights()
    region = publish(publisher, tensors)
    await take(receiver, offer([region], route))
    tensors["rows"][3, 3] += 1
    region = publish(publisher, tensors, base=region.generation)
    _, served = await take(receiver, offer([region], route, 2, "delta"))
    assert served.report.bytes < LAYOUT.parameter_bytes / 4
    assert equal(found(arenas.view(arenas.live_index), LAYOUT), tensors)


async def test_in_place_touches_nothing_before_the_commit(backend: TransferBackend) -> None:
    receiver = InPlaceReceiver(ReplicaArenas(LAYOUT, buffers=1, backend=backend), scope=Scope("r"))
    publisher = PublisherArenas(backend, LAYOUT)
    region = publish(publisher, weights())
    prepared = await receiver.prepare(offer([region], Route(SPEC, SPEC, 0)), lambda: False)
    assert not any(receiver.arenas.view(0))
    assert prepared.fingerprint == publisher.fingerprint(region.generation)
    assert prepared.regions == ()


async def test_in_place_that_failed_offers_nothing_and_takes_the_whole_next_time(backend: TransferBackend) -> None:
    publisher = PublisherArenas(backend, LAYOUT, delta_share=1.0)
    receiver = InPlaceReceiver(ReplicaArenas(LAYOUT, buffers=1, backend=backend), scope=Scope("r"))
    route, tensors = Route(SPEC, SPEC, 0), weights()
    first = publish(publisher, tensors)
    await take(receiver, offer([first], route))
    tensors["norm"][0] += 1
    second = publish(publisher, tensors, base=first.generation)
    offered = offer([second], route, 2)
    prepared = await receiver.prepare(offered, lambda: False)
    publish(publisher, weights(7))
    publish(publisher, weights(8))  # overwrites what was offered

    async def apply(update: Update) -> float:
        assert update.fill
        update.fill()
        return 0.0

    with pytest.raises(GenerationGone):
        await receiver.commit(prepared, apply)
    with pytest.raises(KeyError):
        receiver.arenas.lease(1, "x", 1.0)
    assert receiver.arenas.fingerprint == 0, "a mixture must not be the base of a delta"


@pytest.mark.parametrize("kind", [SwapReceiver, InPlaceReceiver])
async def test_a_staging_that_never_ends_is_given_up_in_time_or_when_asked(
    backend: TransferBackend, kind: type
) -> None:
    publisher = PublisherArenas(backend, LAYOUT)
    staging = publisher.begin()
    region = SourceRegion(0, staging.offer(Scope("r")), "shm", staging.generation)
    receiver = kind(ReplicaArenas(LAYOUT, buffers=1 if kind is InPlaceReceiver else 2, backend=backend))
    route, cancelled = Route(SPEC, SPEC, 0), threading.Event()
    cancelled.set()
    with pytest.raises(ReadCancelled):
        await receiver.prepare(offer([region], route), cancelled.is_set)
    with pytest.raises(ReadDeadlineExceeded):
        await receiver.prepare(offer([region], route, seconds=0.05), lambda: False)
    staging.fail("the learner has died")
    with pytest.raises(GenerationGone, match="the learner has died"):
        await receiver.prepare(offer([region], route), lambda: False)


def test_handles_of_other_runs_generations_and_mixed_transports_are_refused(backend: TransferBackend) -> None:
    region = publish(PublisherArenas(backend, LAYOUT), weights())
    local = ReplicaArenas(LAYOUT, backend=backend).shadow_region(backend)
    route = Route(SPEC, SPEC, 0)
    with pytest.raises(WrongHandle, match="run 'r', this process to run 'other'"):
        Puller(Scope("other")).pull(offer([region], route), local, lambda: False)
    stale = SourceRegion(0, region.handle, "shm", region.generation + 1)
    with pytest.raises(WrongHandle, match="generation 1, expected is 2"):
        Puller(Scope("r")).pull(offer([stale], route), local, lambda: False)
    mixed = [region, SourceRegion(1, region.handle, "tcp", 1)]
    with pytest.raises(WrongHandle, match=r"\['shm', 'tcp'\]"):
        Puller(Scope("r")).pull(offer(mixed, route), local, lambda: False)
