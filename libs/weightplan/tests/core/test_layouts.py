"""Symbolic and explicit layouts: how cuts fall, what is refused, and one hash everywhere."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from explicit_layouts import Shard, ShardedLayout, ShardedTensor, sharded
from hypothesis import given, settings
from plan_worlds import layout_pairs

from reflux_weightplan.boxes import Box
from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.plan import PlanOptions, plan, plan_hash
from reflux_weightplan.sides import Side
from reflux_weightplan.spec import SpecLayout, TensorSpec
from reflux_weightplan.wire import canonical, layout_hash, parse


def rows_by_rank(size: int, mesh: Mesh, *cuts: Cut) -> list[tuple[int, int] | None]:
    layout = SpecLayout(mesh, (TensorSpec("w", (size,), "uint8", Placement(cuts)), TensorSpec("all", (1,), "uint8")))
    shards = {shard.rank: shard.box for shard in sharded(layout).tensors[0].shards}
    return [(shards[r].start[0], shards[r].stop[0]) if r in shards else None for r in range(mesh.ranks)]


def test_chunks_are_those_of_fsdp2_with_empty_ranks_at_the_end() -> None:
    assert rows_by_rank(10, Mesh((("f", 4),)), Cut(0, "f", "chunk")) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert rows_by_rank(5, Mesh((("f", 4),)), Cut(0, "f", "chunk")) == [(0, 2), (2, 4), (4, 5), None]


@pytest.mark.parametrize(("size", "ranks"), [(12, 4), (13, 4), (7, 3), (3, 3)])
def test_even_parts_are_those_of_array_split(size: int, ranks: int) -> None:
    wanted = [(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(size), ranks)]
    assert rows_by_rank(size, Mesh((("t", ranks),)), Cut(0, "t")) == wanted


def test_heads_fewer_than_ranks_lie_on_runs_of_ranks() -> None:
    found = rows_by_rank(8, Mesh((("t", 4),)), Cut(0, "t", "even", 4))
    assert found == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_axes_joined_in_a_cut_count_from_the_first_to_the_last() -> None:
    mesh = Mesh((("a", 2), ("b", 3)))
    assert rows_by_rank(6, mesh, Cut(0, "a+b", "chunk")) == [(r, r + 1) for r in range(6)]
    assert rows_by_rank(6, mesh, Cut(0, "b+a", "chunk")) == [(r, r + 1) for r in (0, 2, 4, 1, 3, 5)]


def test_a_second_cut_divides_what_the_first_left() -> None:
    found = rows_by_rank(10, Mesh((("t", 2), ("f", 2))), Cut(0, "t"), Cut(0, "f", "chunk"))
    assert found == [(0, 3), (3, 5), (5, 8), (8, 10)]


def test_fused_neighbours_lie_side_by_side_and_others_are_aligned() -> None:
    tensors = (
        TensorSpec("up", (3, 5), "uint8", fused="gate_up", fused_order=1),
        TensorSpec("norm", (5,), "uint8"),
        TensorSpec("gate", (3, 5), "uint8", fused="gate_up"),
    )
    offsets = {each.name: each.shards[0].offset for each in sharded(SpecLayout(Mesh(()), tensors)).tensors}
    assert offsets == {"gate": 0, "up": 15, "norm": 256}


def test_interleaved_heads_lie_group_by_group() -> None:
    tensors = tuple(
        TensorSpec(name, (2 * rows, 1), "uint8", fused="qkv", fused_order=order, fused_rows=rows)
        for order, (name, rows) in enumerate((("q", 4), ("k", 2), ("v", 2)))
    )
    explicit = sharded(SpecLayout(Mesh(()), tensors))
    assert [[shard.offset for shard in each.shards] for each in explicit.tensors] == [[0, 8], [4, 12], [6, 14]]
    assert explicit.tensors[0].shards[1].box == Box((4, 0), (8, 1))


MESH = Mesh((("t", 2), ("p", 2)))
BAD_TENSORS = {
    "appears twice": (TensorSpec("w", (2,), "uint8"), TensorSpec("w", (2,), "uint8")),
    "has no name": (TensorSpec("", (2,), "uint8"),),
    "no tensors": (),
    "sizes are at least 1": (TensorSpec("w", (2, 0), "uint8"),),
    "has dtype 'float4'": (TensorSpec("w", (2,), "float4"),),
    "has no dimension 1": (TensorSpec("w", (2,), "uint8", Placement((Cut(1, "t"),))),),
    "no axis 'x'": (TensorSpec("w", (2,), "uint8", Placement((Cut(0, "x"),))),),
    "is pinned to p=2": (TensorSpec("w", (2,), "uint8", Placement((), (("p", 2),))),),
    "twice": (TensorSpec("w", (4, 4), "uint8", Placement((Cut(0, "t"), Cut(1, "t")))),),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_bad_layouts_are_refused_by_name(what: str) -> None:
    with pytest.raises(LayoutRefused, match=what):
        SpecLayout(MESH, BAD_TENSORS[what])


def test_ranks_that_hold_nothing_are_refused() -> None:
    pinned = TensorSpec("w", (2,), "uint8", Placement((), (("p", 1),)))
    with pytest.raises(LayoutRefused, match=r"more ranks than boxes: ranks \[0, 2\] of 4"):
        Side(SpecLayout(MESH, (pinned,)))


def test_as_many_places_as_ranks_or_none() -> None:
    with pytest.raises(LayoutRefused, match="4 ranks need as many places"):
        SpecLayout(MESH, (TensorSpec("w", (2,), "uint8"),), (Place("a"),))


@pytest.mark.parametrize(
    ("what", "specs"),
    [
        ("blocks of 3 rows", [("q", 4, 3)]),
        ("differ in blocks", [("q", 8, 2), ("k", 2, 1)]),
        ("some members of qk are interleaved", [("q", 8, 2), ("k", 4, 0)]),
        ("-2 rows per block", [("q", 8, -2)]),
    ],
)
def test_heads_that_cannot_be_interleaved_are_refused(what: str, specs: list[tuple[str, int, int]]) -> None:
    tensors = tuple(TensorSpec(name, (rows,), "uint8", fused="qk", fused_rows=block) for name, rows, block in specs)
    with pytest.raises(LayoutRefused, match=what):
        Side(SpecLayout(Mesh(()), tensors))


def test_interleaved_members_on_different_stages_are_refused() -> None:
    tensors = tuple(
        TensorSpec(name, (4,), "uint8", Placement((), (("s", stage),)), fused="qk", fused_rows=2)
        for stage, name in enumerate("qk")
    )
    with pytest.raises(LayoutRefused, match="pinned axes"):
        Side(SpecLayout(Mesh((("s", 2),)), tensors))


@pytest.mark.parametrize("cut", [{"rule": "odd"}, {"unit": 0}, {"dim": -1}])
def test_a_cut_without_sense_is_refused(cut: dict[str, Any]) -> None:
    with pytest.raises(LayoutRefused, match="a cut has"):
        Cut(**({"dim": 0, "axis": "s"} | cut))


def explicit(*shards: Shard) -> ShardedLayout:
    return ShardedLayout((ShardedTensor("w", (4, 2), "uint8", shards),), (64, 64))


def rows(rank: int, first: int, last: int, offset: int = 0) -> Shard:
    return Shard(rank, Box((first, 0), (last, 2)), offset, (2, 1))


BAD_SHARDS = {
    r"w: \[2:3, 0:2\] is nowhere": explicit(rows(0, 0, 2), rows(1, 3, 4)),
    r"w: \[1:2, 0:2\] lies in several boxes": explicit(rows(0, 0, 2), rows(1, 1, 4)),
    "leaves the region of rank 1": explicit(rows(0, 0, 2), rows(1, 2, 4, 61)),
    "an empty box": explicit(rows(0, 0, 4), rows(1, 2, 2)),
    "one outside": explicit(rows(0, 0, 5)),
}


@pytest.mark.parametrize("what", BAD_SHARDS)
def test_the_reference_sees_gaps_overlaps_and_strays(what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        BAD_SHARDS[what].check()


def test_equal_boxes_on_several_ranks_are_replicas() -> None:
    explicit(rows(0, 0, 4), rows(1, 0, 4)).check()


@settings(max_examples=30, deadline=None)
@given(layout_pairs())
def test_no_layout_has_a_gap_or_an_overlap(pair: tuple[SpecLayout, SpecLayout]) -> None:
    for layout in pair:
        sharded(layout).check()


@settings(max_examples=30, deadline=None)
@given(layout_pairs())
def test_a_layout_survives_its_canonical_bytes(pair: tuple[SpecLayout, SpecLayout]) -> None:
    for layout in pair:
        again = parse(canonical(layout))
        assert again == layout
        assert layout_hash(again) == layout_hash(layout)


BASE = SpecLayout(
    Mesh((("t", 2),)), (TensorSpec("w", (4, 2), "uint8", Placement((Cut(0, "t"),))),), (Place("a"), Place("b")), "vllm"
)
TENSOR = BASE.tensors[0]
CHANGES = {
    "mesh": {"mesh": Mesh((("u", 2),)), "tensors": (dataclasses.replace(TENSOR, placement=Placement()),)},
    "engine": {"engine": "torch"},
    "place": {"places": (Place("a"), Place("c"))},
    **{
        field: {"tensors": (dataclasses.replace(TENSOR, **{field: value}),)}
        for field, value in {
            "name": "v", "shape": (2, 4), "dtype": "int8", "layer": 3, "fused": "x",
            "placement": Placement((Cut(0, "t", "chunk"),)),
        }.items()
    },
    "fused_order": {"tensors": (dataclasses.replace(TENSOR, fused="x", fused_order=1),)},
    "fused_rows": {"tensors": (dataclasses.replace(TENSOR, fused="x", fused_rows=1),)},
}  # fmt: skip


GARBAGE = (b"", b"{}", b"1\n2\n3", b"[]\n[]\n[]", canonical(BASE)[:-9], canonical(BASE) + b"\n[1]", b"\xff\n\n\n")


@pytest.mark.parametrize("data", GARBAGE)
def test_bytes_that_are_no_layout_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse(data)


def test_every_field_changes_the_hash() -> None:
    hashes = {layout_hash(dataclasses.replace(BASE, **change)) for change in CHANGES.values()}
    assert len(hashes | {layout_hash(BASE)}) == len(CHANGES) + 1


def test_a_plan_has_one_hash_in_every_process() -> None:
    code = """if True:
        import sys
        from reflux_weightplan.plan import PlanOptions, plan
        from reflux_weightplan.wire import parse
        layout = parse(sys.stdin.buffer.read())
        print(plan(layout, layout, PlanOptions(pack_below=5)).hash)
    """
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=canonical(BASE), env=env, stdout=subprocess.PIPE, check=True, timeout=60
    )
    assert done.stdout.decode().strip() == plan(BASE, BASE, PlanOptions(pack_below=5)).hash
    assert plan(BASE, BASE).hash != plan(BASE, BASE, PlanOptions(pack_below=5)).hash


def test_the_hash_of_a_plan_is_known_before_it_is_made() -> None:
    name, options = layout_hash(BASE), PlanOptions(relay="direct")
    assert plan(BASE, BASE, options).hash == plan_hash(name, name, options)
