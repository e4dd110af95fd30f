"""How grants are written for Ray and how its tables are read, for every version of its interface."""

from dataclasses import replace

import pytest

from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.ray.groups import (
    GroupFacts,
    Manifest,
    Share,
    group_arguments,
    manifest_from_json,
    ray_resources,
    status,
    topology_form,
    waiting_reason,
)
from reflux_scheduler.backends.ray.nodes import RayNode, foreign, lacking, read_nodes

DOMAIN = "ray.io/gpu-domain"
SHARES = tuple(Share(f"n{i}", f"id{i}", {"GPU": 4.0}, "nvl-a") for i in range(2))
MANIFEST = Manifest("ab12-0", "asked", SHARES)
PINS = [{"ray.io/node-id": "id0"}, {"ray.io/node-id": "id1"}]
CREATED = GroupFacts("CREATED", "FINISHED")


def row(name: str, node_id: str, alive: bool = True, **resources: float) -> dict:
    labels = {"ray.io/node-id": node_id, "host": f"host-{name}"}
    return {
        "NodeID": node_id, "Alive": alive, "NodeName": name, "NodeManagerAddress": "10.0.0.1", "Labels": labels,
        "Resources": resources if alive else {}, "DeathReasonMessage": "" if alive else "missed heartbeats",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("annotation", "form"),
    [
        (dict[str, str] | None, "dict"),
        (dict, "dict"),
        (list[dict[str, str]] | None, "list"),
        (list[dict[str, str]], "list"),
        (None, "none"),
    ],
)
def test_the_form_of_the_topology_strategy_is_read_from_the_annotation(annotation, form):
    assert topology_form(annotation) == form


def test_one_domain_is_a_topology_strategy_beside_the_pins():
    arguments = group_arguments(MANIFEST, DOMAIN, "dict")
    assert arguments["topology_strategy"] == {DOMAIN: "STRICT_PACK"}
    assert arguments["bundle_label_selector"] == PINS
    assert "strategy" not in arguments, "Ray takes one of the two"
    assert (arguments["name"], arguments["lifetime"]) == ("reflux-ab12-0", "detached")
    assert group_arguments(MANIFEST, DOMAIN, "list")["topology_strategy"] == [{DOMAIN: "STRICT_PACK"}]


def test_ray_without_topology_strategy_gets_the_domain_as_a_selector():
    arguments = group_arguments(MANIFEST, DOMAIN, "none")
    assert "topology_strategy" not in arguments
    assert arguments["bundle_label_selector"] == [{**pin, DOMAIN: "nvl-a"} for pin in PINS]


@pytest.mark.parametrize("domain", ["nvl-b", ""])
def test_a_group_over_several_domains_or_none_is_pinned_only(domain):
    mixed = replace(MANIFEST, shares=(SHARES[0], replace(SHARES[1], domain=domain)))
    for form in ("dict", "list", "none"):
        arguments = group_arguments(mixed, DOMAIN, form)
        assert "topology_strategy" not in arguments
        assert arguments["bundle_label_selector"] == PINS


def test_amounts_become_resources_of_ray_and_nothing_becomes_something():
    assert ray_resources(Resources(4, 1500, 1 << 30)) == {"GPU": 4.0, "CPU": 1.5, "memory": float(1 << 30)}
    assert ray_resources(NOTHING) == {"memory": 1.0}


def test_manifests_survive_the_store():
    ended = MANIFEST.at("ended", 5.0, "gone", ("n1",))
    assert manifest_from_json(ended.to_json()) == ended


def test_a_waiting_group_says_why_in_rays_words():
    assert waiting_reason(None) == ""
    assert waiting_reason(GroupFacts("PENDING", "QUEUED")) == "Ray: QUEUED"
    assert waiting_reason(GroupFacts("PENDING", "NO_RESOURCES")).endswith("(Ray: NO_RESOURCES)")
    assert status(MANIFEST, GroupFacts("PENDING", "INFEASIBLE"), frozenset(), frozenset(), {})["state"] == "waiting"


def test_a_launched_grant_tells_each_lost_node_once_and_why():
    launched = MANIFEST.at("launched", 1.0)
    both, hosts = frozenset({"id0", "id1"}), frozenset({"reflux-ab12-0/0/n0", "reflux-ab12-0/1/n1"})
    fine = status(launched, CREATED, both, hosts, {})
    assert (fine["state"], fine["reason"], fine["lost_nodes"]) == ("granted", "", [])
    dead = status(launched, CREATED, frozenset({"id0"}), frozenset(), {"reflux-ab12-0/1/n1": "ended"})
    assert dead["lost_nodes"] == ["n1", "n0"]
    assert dead["reason"] == "n1: its raylet is gone; n0: the process that held its agent is gone"
    left = status(launched, CREATED, both, hosts, {"reflux-ab12-0/0/n0": "its agent ended with status 3"})
    assert (left["lost_nodes"], left["reason"]) == (["n0"], "n0: its agent ended with status 3")


@pytest.mark.parametrize("facts", [None, GroupFacts("REMOVED")])
def test_a_launched_grant_without_its_group_has_ended(facts):
    ended = status(MANIFEST.at("launched", 1.0), facts, frozenset({"id0", "id1"}), frozenset(), {})
    assert (ended["state"], ended["lost_nodes"]) == ("ended", ["n0", "n1"])


def test_a_node_is_its_living_raylet_whatever_died_before():
    rows = [row("a", "new", CPU=8, GPU=4, memory=100.0), row("a", "old", alive=False)]
    for order in (rows, rows[::-1]):
        (node,) = read_nodes(order).values()
        assert (node.node_id, node.state, node.resources) == ("new", "up", Resources(4, 8000, 100))
    (node,) = read_nodes(rows[1:]).values()
    assert (node.state, node.reason, node.resources) == ("down", "missed heartbeats", NOTHING)
    (node,) = read_nodes(rows, draining={"new": 0}).values()
    assert (node.state, node.reason) == ("draining", "Ray is draining it")


def test_two_living_raylets_of_one_name_get_no_work():
    (node,) = read_nodes([row("a", "1", CPU=8), row("a", "2", CPU=8)]).values()
    assert node.state == "down"
    assert node.reason == "2 raylets call themselves a: give each its own --node-name"
    assert node.resources == NOTHING


def test_a_label_can_name_the_nodes():
    assert list(read_nodes([row("a", "1"), row("b", "2")], "host")) == ["host-a", "host-b"]
    assert read_nodes([row("a", "1")], "no-such-label") == {}


def test_what_others_hold_is_what_is_neither_free_nor_ours():
    node = RayNode("a", "1", "10.0.0.1", "up", resources=Resources(8, 8000, 100))
    free = {"1": {"GPU": 2.0, "CPU": 3.5, "memory": 100.0}}
    assert foreign([node], free, {"1": Resources(4, 4000)}) == {"a": Resources(2, 500)}
    assert foreign([node], {"1": {"GPU": 8.0, "CPU": 8.0, "memory": 100.0}}, {"1": Resources(4)}) == {"a": NOTHING}
    assert foreign([node], {}, {}) == {}
    assert lacking(Resources(9, 8000, 101), node) == "9 GPUs of 8, 101 bytes of memory of 100"
