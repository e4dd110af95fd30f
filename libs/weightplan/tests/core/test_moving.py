"""What a plan moves: every byte to its place, whatever the layouts, the packing and the route."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plan_worlds import bytes_of, explicit_of, fill, layout_pairs, regions

from reflux_weightplan.apply import apply
from reflux_weightplan.expand import Expander
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.plan import Plan, PlanOptions, plan
from reflux_weightplan.spec import SpecLayout, TensorSpec

PACKING = st.sampled_from((0, 16, 64, 1 << 20))
ROUTES = st.sampled_from(("direct", "relay"))


def move_and_compare(source: SpecLayout, target: SpecLayout, options: PlanOptions) -> Plan:
    tensors = fill(source)
    made = plan(source, target, options)
    out = regions(explicit_of(target), {name: np.zeros_like(data) for name, data in tensors.items()})
    apply(made, regions(explicit_of(source), tensors), out)
    wanted = regions(explicit_of(target), tensors)
    differing = [rank for rank, (left, right) in enumerate(zip(out, wanted, strict=True)) if (left != right).any()]
    assert not differing, f"ranks {differing} differ"
    return made


@settings(max_examples=100, deadline=None)
@given(layout_pairs(), PACKING, ROUTES)
def test_random_layouts_move_every_byte(
    pair: tuple[SpecLayout, SpecLayout], pack_below: int, relay: Literal["direct", "relay"]
) -> None:
    move_and_compare(*pair, PlanOptions(pack_below=pack_below, relay=relay))


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(layout_pairs(), PACKING, ROUTES)
def test_five_thousand_random_layouts_move_every_byte(
    pair: tuple[SpecLayout, SpecLayout], pack_below: int, relay: Literal["direct", "relay"]
) -> None:
    move_and_compare(*pair, PlanOptions(pack_below=pack_below, relay=relay))


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), PACKING)
def test_the_model_of_messages_and_bytes_is_what_the_ranks_do(
    pair: tuple[SpecLayout, SpecLayout], pack_below: int
) -> None:
    made = plan(*pair, PlanOptions(pack_below=pack_below, relay="direct"))
    expander = Expander(made)
    for rank in range(made.target.ranks):
        rows = expander.transfers(rank).rows
        assert bytes_of(rows) == made.traffic[:, rank].sum()
        assert reads_of(rows) <= made.messages[:, rank].sum()
        if not rows["packed"].any():
            assert reads_of(rows) == made.messages[:, rank].sum()
        assert (made.traffic[rows["source_rank"], rank] > 0).all()


def reads_of(rows: NDArray[np.void]) -> int:
    """One-sided reads when what lies side by side at the source is read at once; packed bytes go through a buffer, so
    that only their source matters."""
    left, right = rows[:-1], rows[1:]
    same = (left["bucket"] == right["bucket"]) & (left["source_rank"] == right["source_rank"])
    ends = left["source_offset"] + left["run_bytes"] * np.where(right["packed"], left["runs"], 1)
    direct = (left["runs"] == 1) & (right["runs"] == 1) & (left["tensor"] == right["tensor"])
    direct &= left["target_offset"] + left["run_bytes"] == right["target_offset"]
    continues = np.zeros(len(rows), bool)
    continues[1:] = same & (ends == right["source_offset"]) & (right["packed"] | direct)
    return int(np.where(rows["packed"], 1, rows["runs"])[~continues].sum())


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), PACKING, ROUTES)
def test_pieces_are_numbered_in_the_order_of_buckets_and_cover_what_is_read(
    pair: tuple[SpecLayout, SpecLayout], pack_below: int, relay: Literal["direct", "relay"]
) -> None:
    made = plan(*pair, PlanOptions(pack_below=pack_below, relay=relay))
    expander = Expander(made)
    published = [expander.pieces(rank) for rank in range(made.source.ranks)]
    for pieces in published:
        rows = pieces.rows
        assert np.unique(rows["piece"]).tolist() == list(range(rows["piece"].max(initial=-1) + 1))
        assert (np.diff(rows["bucket"]) >= 0).all()
        packed = rows[rows["pack_offset"] >= 0]
        sizes = packed["run_bytes"] * packed["runs"]
        assert packed["pack_offset"].tolist() == (np.cumsum(sizes) - sizes).tolist()
        assert pieces.pack_bytes == sizes.sum()
    for rank in range(made.target.ranks):
        for row in expander.transfers(rank).rows:
            rows = published[row["source_rank"]].rows
            rows = rows[rows["piece"] == row["piece"]]
            offsets = rows["pack_offset"] if row["packed"] else rows["source_offset"]
            found = rows[offsets == row["source_offset"]]
            assert len(found) == 1
            assert (found["run_bytes"][0], found["runs"][0]) == (row["run_bytes"], row["runs"])
            assert found["bucket"][0] == row["bucket"]


def test_short_runs_are_packed_at_the_source() -> None:
    source = SpecLayout(Mesh((("f", 2),)), (TensorSpec("o", (64, 96), "bfloat16", Placement((Cut(0, "f", "chunk"),))),))
    target = SpecLayout(Mesh((("t", 3),)), (TensorSpec("o", (64, 96), "bfloat16", Placement((Cut(1, "t"),))),))
    loose = move_and_compare(source, target, PlanOptions(pack_below=64))
    tight = move_and_compare(source, target, PlanOptions(pack_below=65))
    assert loose.messages.tolist() == [[32] * 3] * 2
    assert tight.messages.tolist() == [[1] * 3] * 2
    assert (Expander(loose).pieces(0).rows["pack_offset"] == -1).all()
    gathered = Expander(tight).pieces(0).rows
    assert (gathered["pack_offset"] >= 0).all()
    assert gathered[["run_bytes", "runs", "pitch"]].tolist() == [(64, 32, 192)] * 3
    assert [transfer.packed for transfer in Expander(tight).transfers(2)] == [True, True]


def test_boxes_of_very_many_runs_are_packed_however_long_these_are() -> None:
    source = SpecLayout(Mesh(()), (TensorSpec("o", (300, 4), "float32"),))
    target = SpecLayout(Mesh((("t", 2),)), (TensorSpec("o", (300, 4), "float32", Placement((Cut(1, "t"),))),))
    assert plan(source, target, PlanOptions(pack_below=0, max_runs=300)).messages.tolist() == [[300, 300]]
    assert plan(source, target, PlanOptions(pack_below=0, max_runs=299)).messages.tolist() == [[1, 1]]


def test_grouped_heads_under_wide_tensor_parallelism_come_from_one_place() -> None:
    cut = Placement((Cut(0, "t", "even", 4),))
    source = SpecLayout(Mesh((("f", 3),)), (TensorSpec("k", (8, 5), "float32", Placement((Cut(0, "f", "chunk"),))),))
    target = SpecLayout(Mesh((("t", 4),)), (TensorSpec("k", (8, 5), "float32", cut),))
    made = move_and_compare(source, target, PlanOptions())
    assert made.traffic.sum(axis=0).tolist() == [80] * 4


def test_a_large_tensor_is_moved_in_pieces_of_four_mebibytes() -> None:
    source = SpecLayout(Mesh((("f", 2),)), (TensorSpec("e", (3000, 2500), "bfloat16", Placement((Cut(0, "f"),))),))
    target = SpecLayout(Mesh(()), (TensorSpec("e", (3000, 2500), "bfloat16"),))
    made = move_and_compare(source, target, PlanOptions(bucket_bytes=5 << 20))
    rows = Expander(made).transfers(0).rows
    sizes = rows["run_bytes"] * rows["runs"]
    assert sizes.max() <= 4 << 20
    assert len(rows) == 4
    assert made.messages.tolist() == [[1], [1]]
    assert np.bincount(rows["bucket"], weights=sizes).max() <= 5 << 20
    assert len(made.buckets) > 1


@pytest.mark.parametrize("pack_below", [0, 1 << 20])
def test_boxes_cut_along_two_inner_dimensions_arrive(pack_below: int) -> None:
    source = SpecLayout(Mesh(()), (TensorSpec("w", (4, 6, 8), "bfloat16"),))
    cuts = Placement((Cut(1, "t"), Cut(2, "u")))
    target = SpecLayout(Mesh((("t", 2), ("u", 2))), (TensorSpec("w", (4, 6, 8), "bfloat16", cuts),))
    made = move_and_compare(source, target, PlanOptions(pack_below=pack_below))
    assert made.messages.tolist() == [[1] * 4 if pack_below else [12] * 4]
