"""Pulls by plans: several sources, packed pieces, strided runs, and sources that were staged for somebody else."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import Extra, Gather, Geometry, Packing
from reflux_transfer.arenas.packing import packing, rank_layout
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import ChecksumMismatch, LayoutError, PlanNotStaged
from reflux_transfer.layout import Layout
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import WholeTensor
from reflux_weightplan.apply import apply
from reflux_weightplan.expand import Expander
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.plan import Plan, PlanOptions, plan
from reflux_weightplan.spec import SpecLayout, TensorSpec

SLICE = 512
ELEMENTS = 4  # bytes of float32


def placements(axis: str, dims: int) -> st.SearchStrategy[Placement]:
    cut = st.builds(Cut, st.integers(0, dims - 1), st.just(axis), st.sampled_from(["chunk", "even"]))
    return st.one_of(st.just(Placement()), cut.map(lambda cut: Placement((cut,))))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SpecLayout, SpecLayout]:
    """Two layouts of the same tensors on 1 to 3 ranks; at least one tensor lies everywhere."""
    source, target = Mesh((("s", draw(st.integers(1, 3))),)), Mesh((("t", draw(st.integers(1, 3))),))
    ours, theirs = [TensorSpec("norm", (7,), "float32")], [TensorSpec("norm", (7,), "float32")]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(3, 40), min_size=1, max_size=2)))
        ours.append(TensorSpec(f"w{index}", shape, "float32", draw(placements("s", len(shape)))))
        theirs.append(TensorSpec(f"w{index}", shape, "float32", draw(placements("t", len(shape)))))
    return SpecLayout(source, tuple(ours)), SpecLayout(target, tuple(theirs))


def memories(planned: Plan) -> list[np.ndarray]:
    """Random bytes per source rank; ranks that hold equal bytes of a tensor get them from one global tensor."""
    rng = np.random.default_rng(7)
    values = {
        t.name: rng.integers(1, 256, (*(t.shape or (1,)), ELEMENTS), np.uint8) for t in planned.source.layout.tensors
    }
    found = []
    for rank in range(planned.source.ranks):
        region = planned.source.region(rank)
        memory = np.zeros(region.nbytes, np.uint8)
        for kind in range(len(planned.source.form_K)):
            tensors = planned.source.tensors_of_kind(kind)
            box = planned.source.box_KR[kind, rank]
            if box < 0:
                continue
            where = tuple(slice(low, high) for low, high in planned.source.form_of_kind(kind).boxes[box].tolist())
            for index, offset in zip(tensors, planned.source.offsets(region, tensors), strict=True):
                part = values[planned.source.layout.tensors[index].name][where].reshape(-1)
                memory[offset : offset + len(part)] = part
        found.append(memory)
    return found


def stage(
    backend: ShmBackend, planned: Plan, expander: Expander, regions: Sequence[np.ndarray], packed: bool
) -> list[Staging]:
    """Every source rank's region in an arena of its own, staged for the plan or for nobody."""
    found = []
    for rank, memory in enumerate(regions):
        layout = rank_layout(planned.source, rank)
        extras = [packing(planned.hash, expander.pieces(rank), layout, SLICE)] if packed else []
        staging = PublisherArenas(backend, layout, SLICE, pack_share=99).begin(packings=extras)
        staging.write({slot.name: memory[slot.offset : slot.end].view(np.float32) for slot in layout.slots})
        found.append(staging)
    return found


def pull(backend: ShmBackend, stagings: Sequence[Staging], planned: Plan, rank: int) -> tuple[PullReport, np.ndarray]:
    size = planned.target.region(rank).nbytes
    local = backend.allocate(size)
    sources = [RemoteSource(backend.open(each.offer()), each.generation, at) for at, each in enumerate(stagings)]
    transfers = Expander(planned).transfers(rank)
    report = follow(backend, sources, local, transfers, deadline_seconds=20, plan_hash=planned.hash)
    return report, np.frombuffer(local.view, np.uint8)


def assert_arrives(source: SpecLayout, target: SpecLayout, options: PlanOptions, staged: bool) -> None:
    planned = plan(source, target, options)
    regions, backend = memories(planned), ShmBackend()
    expected = [np.zeros(planned.target.region(rank).nbytes, np.uint8) for rank in range(planned.target.ranks)]
    apply(planned, regions, expected)
    stagings = stage(backend, planned, Expander(planned), regions, staged)
    reports = []
    for rank in range(planned.target.ranks):
        report, found = pull(backend, stagings, planned, rank)
        for slot in rank_layout(planned.target, rank).slots:
            assert (found[slot.offset : slot.end] == expected[rank][slot.offset : slot.end]).all(), slot.name
        reports.append(report)
    backend.close()
    assert len({report.fingerprint for report in reports}) == 1  # also where ranks read from different sources


@settings(max_examples=15, deadline=None)
@given(layouts(), st.sampled_from([0, 64, 1 << 20]))
def test_random_layouts_arrive_from_sources_that_were_staged_for_them(
    pair: tuple[SpecLayout, SpecLayout], pack_below: int
) -> None:
    assert_arrives(*pair, PlanOptions(pack_below=pack_below, relay="direct"), staged=True)


@settings(max_examples=15, deadline=None)
@given(layouts())
def test_random_layouts_arrive_from_sources_that_do_not_know_them(pair: tuple[SpecLayout, SpecLayout]) -> None:
    """Without extras and without packing the covering pieces are read."""
    assert_arrives(*pair, PlanOptions(pack_below=0, max_runs=1 << 40, relay="direct"), staged=False)


def columns() -> tuple[SpecLayout, SpecLayout]:
    cut = Placement((Cut(1, "t"),))
    source = SpecLayout(Mesh(()), (TensorSpec("w", (40, 64), "float32"),))
    return source, SpecLayout(Mesh((("t", 2),)), (TensorSpec("w", (40, 64), "float32", cut),))


def test_packed_pieces_move_exactly_their_bytes() -> None:
    planned, backend = plan(*columns(), PlanOptions(relay="direct")), ShmBackend()
    stagings = stage(backend, planned, Expander(planned), memories(planned), packed=True)
    report, _ = pull(backend, stagings, planned, 1)
    assert (report.bytes, report.slices) == (40 * 32 * ELEMENTS, 1)
    backend.close()


def test_a_source_that_packs_for_another_plan_is_told_apart() -> None:
    """Packed offsets of two plans look alike: without the name of the plan wrong bytes would pass their checksums."""
    source, target = columns()
    planned, backend = plan(source, target, PlanOptions(relay="direct")), ShmBackend()
    other = plan(source, target, PlanOptions(relay="direct", pack_below=1 << 20))
    stagings = stage(backend, other, Expander(other), memories(other), packed=True)
    with pytest.raises(PlanNotStaged, match="w: the source has packed nothing for this plan"):
        pull(backend, stagings, planned, 1)
    backend.close()


def test_an_arena_packs_for_several_plans() -> None:
    source, target = columns()
    plans = [plan(source, target, PlanOptions(relay="direct", pack_below=size)) for size in (1 << 18, 1 << 20)]
    backend, memory, layout = ShmBackend(), memories(plans[0])[0], rank_layout(plans[0].source, 0)
    packings = [packing(each.hash, Expander(each).pieces(0), layout, SLICE) for each in plans]
    staging = PublisherArenas(backend, layout, SLICE, pack_share=2.0).begin(packings=packings)
    staging.write({"w": memory[: layout.region_bytes].view(np.float32)})
    expected = memory[: layout.region_bytes].view(np.float32).reshape(40, 64)
    for each in plans:
        for rank, half in enumerate(np.split(expected, 2, axis=1)):
            _, found = pull(backend, [staging], each, rank)
            assert (found[: half.nbytes] == np.ascontiguousarray(half).reshape(-1).view(np.uint8)).all()
    backend.close()


def test_a_flipped_bit_in_packed_bytes_names_the_tensor() -> None:
    planned, backend = plan(*columns(), PlanOptions(relay="direct")), ShmBackend()
    layout, allocated = rank_layout(planned.source, 0), []
    allocate = backend.allocate
    backend.allocate = lambda length, **hints: allocated.append(allocate(length, **hints)) or allocated[-1]
    extras = packing(planned.hash, Expander(planned).pieces(0), layout, SLICE)
    staging = PublisherArenas(backend, layout, SLICE).begin(packings=[extras])
    staging.write({"w": memories(planned)[0][: layout.region_bytes].view(np.float32)})
    for region in allocated:
        region.view[Geometry(layout, SLICE, (extras,)).pack_offset + 9] ^= 1
    with pytest.raises(ChecksumMismatch, match="mismatch in w"):
        pull(backend, [staging], planned, 0)
    backend.close()


def test_strided_runs_have_one_checksum() -> None:
    layout = Layout.from_shapes({"w": ([16, 64], "uint8")})
    backend, gather = ShmBackend(), Gather(32, 32, 16, 64)
    arenas = PublisherArenas(backend, layout, 128)
    values = np.random.default_rng(1).integers(0, 256, (16, 64), np.uint8)
    with arenas.begin(packings=[Packing("p", (Extra((gather,)),))]) as staging:
        staging.write({"w": values})
    local = backend.allocate(512)
    move = WholeTensor("w", 32, 0, 32, runs=16, source_pitch=64, target_pitch=32)
    source = RemoteSource(backend.open(staging.offer()), 1)
    report = follow(backend, [source], local, [move], deadline_seconds=9)
    assert bytes(local.view) == np.ascontiguousarray(values[:, 32:]).tobytes()
    assert (report.bytes, report.slices) == (512, 1)
    arenas.view(1)[64 + 40] ^= 1
    with pytest.raises(ChecksumMismatch, match="mismatch in w"):
        follow(backend, [source], local, [move], deadline_seconds=9)
    backend.close()


def test_moves_and_extras_outside_of_tensors_are_refused_by_name() -> None:
    layout = Layout.from_shapes({"a": ([100], "uint8"), "b": ([100], "uint8")})
    backend = ShmBackend()
    with pytest.raises(LayoutError, match=r"bytes \[90, 110\)"):
        PublisherArenas(backend, layout).begin(packings=[Packing("p", (Extra((Gather(90, 20),)),))])
    staging = PublisherArenas(backend, layout).begin()
    staging.write({"a": np.zeros(100, np.uint8), "b": np.zeros(100, np.uint8)})
    local, source = backend.allocate(400), RemoteSource(backend.open(staging.offer()), 1)
    with pytest.raises(LayoutError, match="a: byte 100 of the source lies in none"):
        follow(backend, [source], local, [WholeTensor("a", 0, 0, 101)], deadline_seconds=9)
    backend.close()


def test_the_fingerprint_of_several_ranks_is_the_tree_over_theirs() -> None:
    cut = Placement((Cut(0, "s"),))
    source = SpecLayout(Mesh((("s", 3),)), (TensorSpec("w", (9, 8), "float32", cut),))
    planned = plan(source, SpecLayout(Mesh(()), (TensorSpec("w", (9, 8), "float32"),)), PlanOptions(relay="direct"))
    backend, regions = ShmBackend(), memories(planned)
    stagings = stage(backend, planned, Expander(planned), regions, packed=True)
    report, _ = pull(backend, stagings, planned, 0)
    parts = [
        fingerprint.of(memoryview(each), rank_layout(planned.source, at), SLICE) for at, each in enumerate(regions)
    ]
    assert report.fingerprint == fingerprint.tree(parts)
    backend.close()
