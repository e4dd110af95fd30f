"""Relaying: trainers send each byte once, peers pass it on; exactly and in less time."""

from dataclasses import replace

import numpy as np
from plan_worlds import bytes_of, deepseek_like, explicit_of, fill, regions

from reflux_weightplan.apply import apply
from reflux_weightplan.expand import Expander
from reflux_weightplan.explain import explain
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.plan import PlanOptions, plan
from reflux_weightplan.spec import SpecLayout, TensorSpec


def pair(replicas: int, *, shards: int = 2, layers: int = 6) -> tuple[SpecLayout, SpecLayout]:
    names = [f"{layer}.{name}" for layer in range(layers) for name in "qkvo"]
    cut, split = Placement((Cut(0, "f", "chunk"),)), Placement((Cut(0, "t"),))
    source = [TensorSpec(name, (64, 512), "float32", cut, int(name[0])) for name in names]
    target = [TensorSpec(name, (64, 512), "float32", split, int(name[0])) for name in names]
    return SpecLayout(Mesh((("f", shards),)), tuple(source)), SpecLayout(
        Mesh((("replica", replicas), ("t", 2))), tuple(target)
    )


def test_trainers_send_every_byte_once_when_peers_relay() -> None:
    source, target = pair(3)
    made = plan(source, target, PlanOptions(relay="relay"))
    assert made.relay is not None
    sent = sum(stage.nbytes_SD[:2] for stage in made.relay.stages)
    passed = sum(stage.nbytes_SD[2:] for stage in made.relay.stages)
    assert sent.sum() == source.nbytes
    assert passed.sum() == 2 * source.nbytes
    expander = Expander(made)
    for rank in range(6):
        fetches = expander.fetches(rank)
        read, fetched = bytes_of(expander.transfers(rank).rows), bytes_of(fetches)
        assert read == sent[:, rank].sum()
        assert fetched == passed[:, rank].sum()
        assert read + fetched == source.nbytes / 2
        assert set(fetches["peer"].tolist()) == {peer for peer in range(6) if peer % 2 == rank % 2} - {rank}
        assert made.relay.servers(rank).keys() == {0, 1, 2} - {rank // 2}


def test_a_peer_passes_on_only_what_it_has_read_itself() -> None:
    made = plan(*pair(3), PlanOptions(relay="relay"))
    expander = Expander(made)
    own = [set(expander.transfers(rank).rows["tensor"].tolist()) for rank in range(6)]
    for rank in range(6):
        for row in expander.fetches(rank):
            assert row["tensor"] in own[row["peer"]]
            assert row["tensor"] not in own[rank]


def test_contents_with_more_and_fewer_peers_arrive_too() -> None:
    source = SpecLayout(Mesh((("f", 2),)), tuple(TensorSpec(f"w{n}", (8, 3), "float32") for n in range(5)))
    cut = Placement((Cut(0, "t", "even", 4),))
    target = SpecLayout(
        Mesh((("r", 2), ("t", 3))), tuple(TensorSpec(f"w{n}", (8, 3), "float32", cut) for n in range(5))
    )
    made = plan(source, target, PlanOptions(relay="relay"))
    assert sorted(len(members) for members in made.peers.members) == [2, 4]
    assert made.relay is not None
    tensors = fill(source)
    wanted = regions(explicit_of(target), tensors)
    out = [np.zeros_like(region) for region in wanted]
    apply(made, regions(explicit_of(source), tensors), out)
    assert all((left == right).all() for left, right in zip(out, wanted, strict=True))


def test_bytes_that_stay_in_a_domain_load_no_port_of_the_bound() -> None:
    source, target = pair(4, shards=8)
    near = tuple(Place(f"host-{rank}", domain="rack") for rank in range(8))
    made = plan(source, replace(target, places=near), PlanOptions(relay="relay"))
    apart = plan(source, target, PlanOptions(relay="relay"))
    assert 0 < made.efficiency <= 1
    assert made.lower_bound_seconds < apart.lower_bound_seconds


def test_the_faster_route_is_taken() -> None:
    assert plan(*pair(4, shards=2)).route == "relay"
    assert plan(*pair(4, shards=2), PlanOptions(relay="direct")).route == "direct"
    assert plan(*pair(1)).route == "direct"
    assert plan(*pair(2, shards=8)).route == "direct", "the targets' ports are the bound: nothing to gain"


def test_relay_within_bound() -> None:
    made = plan(*deepseek_like(layers=8, experts=128, replicas=4))
    assert made.route == "relay"
    assert made.makespan_seconds <= 1.3 * made.lower_bound_seconds
    busiest_source_seconds = made.traffic.sum(axis=1).max() / 50e9
    assert made.makespan_seconds < 0.75 * busiest_source_seconds, "no direct schedule could be as fast"


def test_a_plan_explains_itself() -> None:
    source, target = pair(3)
    told = explain(plan(source, target))
    assert told.nbytes == 3 * source.nbytes
    assert (told.tensors, told.classes, told.templates, told.route) == (24, 1, 1, "relay")
    assert told.tier_bytes == {"same host": 0, "NVLink domain": 0, "rack": 0, "spine": 3 * source.nbytes}
    assert told.target_bytes == (source.nbytes // 2, source.nbytes // 2)
    text = "\n".join(told.lines())
    assert "24 in 1 classes" in text
    assert f"efficiency {told.efficiency:.3f}" in text
    assert told.json()["hash"] in text
