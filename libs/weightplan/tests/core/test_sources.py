"""Which replica serves whom: least loaded, near before far, never a lost one; and what is refused."""

from collections.abc import Iterable

import numpy as np
import pytest
from plan_worlds import deepseek_like, explicit_of, fill, regions

from reflux_weightplan.apply import apply
from reflux_weightplan.boxes import Box
from reflux_weightplan.errors import LayoutRefused, PlanRefused
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.plan import PlanOptions, plan
from reflux_weightplan.spec import SpecLayout, TensorSpec

CHUNK = Placement((Cut(0, "f", "chunk"),))


def spec(
    mesh: Mesh, placement: Placement = CHUNK, *, places: Iterable[Place] = (), count: int = 1, rows: int = 1 << 16
) -> SpecLayout:
    tensors = tuple(TensorSpec(f"w{index}", (rows, 8), "float32", placement) for index in range(count))
    return SpecLayout(mesh, tensors, tuple(places))


def test_hsdp_sources_are_within_one_percent_of_ideal() -> None:
    source, target = deepseek_like(layers=8, experts=128, copies=2)
    ranks = source.mesh.ranks
    one_copy = plan(*deepseek_like(layers=8, experts=128), PlanOptions(relay="direct")).traffic
    single = one_copy.sum(axis=1) / 50e9
    background = np.random.default_rng(0).uniform(0, 0.3, ranks) * single.max() / 2
    made = plan(source, target, PlanOptions(relay="direct", background=tuple(background)))
    load = made.traffic.sum(axis=1) / 50e9 + background
    first, second = background[: ranks // 2], background[ranks // 2 :]
    ideal = np.maximum((single + first + second) / 2, np.maximum(first, second)).max()
    assert load.max() <= 1.01 * ideal
    assert (single + first).max() > 1.5 * ideal, "always taking the first copy would be far off"
    assert made.traffic.sum(axis=0).tolist() == one_copy.sum(axis=0).tolist()


def test_a_few_full_copies_share_the_work_of_one_reader() -> None:
    made = plan(spec(Mesh((("copy", 3),)), Placement(), count=24), spec(Mesh(()), Placement(), count=24))
    sent = made.traffic.sum(axis=1)
    assert sent.max() <= 1.2 * sent.mean()


def test_the_copy_on_the_readers_host_serves_it() -> None:
    here, there = Place("a", nic="0"), Place("b", nic="0")
    source = spec(Mesh((("copy", 2),)), Placement(), places=(there, here), count=8)
    made = plan(source, spec(Mesh(()), Placement(), places=(Place("a", nic="1"),), count=8))
    assert made.traffic[:, 0].tolist() == [0, 8 << 21]
    assert made.lower_bound_seconds == pytest.approx((8 << 21) / 300e9), "bytes inside a host use no port"


@pytest.mark.parametrize("near_first", [False, True])
def test_the_copy_in_the_rack_is_favoured_until_its_port_is_busier(near_first: bool) -> None:
    near = 0 if near_first else 1
    places = [Place("a", rack="r1"), Place("a", rack="r1")]
    places[near] = Place("b", rack="r2")
    source = spec(Mesh((("copy", 2),)), Placement(), places=tuple(places), count=1)
    target = spec(Mesh(()), Placement(), places=(Place("c", rack="r2"),), count=1)
    favoured = plan(source, target).traffic[:, 0]
    assert favoured[near] > 0
    assert favoured[1 - near] == 0
    owed = (1.0, 0.0) if near_first else (0.0, 1.0)
    busy = plan(source, target, PlanOptions(background=owed)).traffic[:, 0]
    assert busy[near] == 0


def test_ranks_with_one_adapter_share_its_port() -> None:
    shared = (Place("a", nic="0"), Place("a", nic="0"))
    wide = plan(spec(Mesh((("f", 2),))), spec(Mesh((("f", 2),))))
    narrow = plan(spec(Mesh((("f", 2),)), places=shared), spec(Mesh((("f", 2),))))
    assert narrow.makespan_seconds == pytest.approx(2 * wide.makespan_seconds)


def test_a_slow_port_sets_the_bound() -> None:
    slow = (Place("a"), Place("b", bytes_per_second=5e9))
    made = plan(spec(Mesh((("f", 2),)), places=slow), spec(Mesh((("f", 2),))))
    assert made.lower_bound_seconds == pytest.approx((1 << 20) / 5e9)


def test_a_lost_rank_is_replaced_by_its_copy() -> None:
    source, target = spec(Mesh((("copy", 2), ("f", 2)))), spec(Mesh((("t", 3),)), Placement((Cut(0, "t"),)))
    made = plan(source, target, PlanOptions(lost=(0,)))
    assert not made.traffic[0].any()
    tensors = fill(source)
    wanted = regions(explicit_of(target), tensors)
    out = [np.zeros_like(region) for region in wanted]
    apply(made, regions(explicit_of(source), tensors), out)
    assert all((left == right).all() for left, right in zip(out, wanted, strict=True))


def test_a_gap_is_refused_with_its_range() -> None:
    source, target = spec(Mesh((("f", 4),)), rows=16), spec(Mesh((("t", 2),)), Placement((Cut(1, "t"),)), rows=16)
    with pytest.raises(
        PlanRefused, match=r"2 ranges have no source; missing w0\[4:8, 0:4\], w0\[4:8, 4:8\]"
    ) as refused:
        plan(source, target, PlanOptions(lost=(1,)))
    assert refused.value.missing == (("w0", Box((4, 0), (8, 4))), ("w0", Box((4, 4), (8, 8))))


def test_tensors_that_the_source_lacks_are_refused_whole() -> None:
    with pytest.raises(PlanRefused, match=r"lacks 1 tensors of the target; missing w1\[0:65536, 0:8\]"):
        plan(spec(Mesh((("f", 2),))), spec(Mesh(()), Placement(), count=2))


def test_tensors_that_the_target_does_not_know_stay_behind() -> None:
    made = plan(spec(Mesh((("f", 2),)), count=3), spec(Mesh(()), Placement()))
    assert made.traffic.sum() == 1 << 21


@pytest.mark.parametrize(("shape", "dtype"), [((4, 4), "float32"), ((4, 2), "bfloat16")])
def test_other_shapes_and_types_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    source = SpecLayout(Mesh(()), (TensorSpec("w", (4, 2), "float32"),))
    with pytest.raises(PlanRefused, match=r"w is float32\[4, 2\] here, "):
        plan(source, SpecLayout(Mesh(()), (TensorSpec("w", shape, dtype),)))


@pytest.mark.parametrize(
    "options", [PlanOptions(bucket_bytes=1 << 22), PlanOptions(background=(0.0,)), PlanOptions(lost=(2,))]
)
def test_options_that_do_not_fit_are_refused(options: PlanOptions) -> None:
    with pytest.raises(LayoutRefused):
        plan(spec(Mesh((("f", 2),))), spec(Mesh(()), Placement()), options)
