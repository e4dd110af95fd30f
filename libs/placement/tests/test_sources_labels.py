"""Node labels of Kubernetes and Ray as a topology."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.errors import InvalidTopology
from reflux_placement.sources.labels import (
    KUBERNETES_LEVEL_KEYS,
    NVLINK_CLIQUE,
    RAY_LEVEL_KEYS,
    LabelledNode,
    domain_name,
    topology_from_labels,
)
from reflux_placement.topology import Resources

TRAY = Resources(gpus=4, millicpus=144_000, memory_bytes=960 << 30)
UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
BLOCK = "cloud.provider.com/topology-block"
RACK = "cloud.provider.com/topology-rack"
ZONE = "topology.kubernetes.io/zone"


def node(name: str, **labels: str) -> LabelledNode:
    keys = {"clique": NVLINK_CLIQUE, "block": BLOCK, "rack": RACK, "zone": ZONE}
    return LabelledNode(name, TRAY, {keys[key]: value for key, value in labels.items()})


def names(topology, level: str) -> list[list[str]]:
    return [[topology.nodes[index].name for index in domain.indices] for domain in topology.domains(level)]


def test_cliques_become_racks_inside_blocks_and_zones():
    nodes = [
        node(f"gb-{n}", zone="z1", block=f"b{n // 4}", clique=f"{UUID}.{n // 2}") for n in (10, 2, 3, 0, 1, 11, 8, 9)
    ]
    topology = topology_from_labels("gb200", nodes)
    assert topology.levels == ("node", "rack", "block", "zone", "cluster")
    assert [each.name for each in topology.nodes] == ["gb-0", "gb-1", "gb-2", "gb-3", "gb-8", "gb-9", "gb-10", "gb-11"]
    assert names(topology, "rack") == [["gb-0", "gb-1"], ["gb-2", "gb-3"], ["gb-8", "gb-9"], ["gb-10", "gb-11"]]
    assert topology.domains("rack")[0].label == f"gb200/z1/b0/{UUID}.0"
    assert topology.capacity_NR[0].tolist() == [4, 144_000, 960 << 30]


def test_one_rack_label_in_two_blocks_is_two_racks():
    topology = topology_from_labels(
        "c", [node(f"n{block}{n}", block=f"b{block}", rack="r1") for block in (0, 1) for n in (0, 1)]
    )
    assert [domain.label for domain in topology.domains("rack")] == ["c/b0/r1", "c/b1/r1"]


def test_a_node_without_a_label_belongs_to_no_domain_of_that_level():
    topology = topology_from_labels(
        "c", [node("a", block="b"), node("b", block="b", clique=f"{UUID}.1"), node("c", clique="N/A"), node("d")]
    )
    assert topology.domain_of("rack", topology.index_of("a")) is None
    assert topology.domain_of("rack", topology.index_of("c")) is None
    assert topology.domain_of("block", topology.index_of("d")) is None
    assert names(topology, "rack") == [["b"]]


def test_a_node_whose_fabric_is_not_up_does_not_form_a_rack_of_its_own_by_another_label():
    topology = topology_from_labels(
        "c", [node("a", clique=f"{UUID}.1", rack="r1"), node("b", rack="r1"), node("c", rack="r2")]
    )
    assert names(topology, "rack") == [["a"], ["c"]]
    assert topology.domain_of("rack", topology.index_of("b")) is None


def test_equal_names_under_two_keys_stay_two_domains():
    coreweave = LabelledNode("b", TRAY, {"ds.coreweave.com/nvlink.domain": "1"})
    topology = topology_from_labels("c", [node("a", rack="1"), coreweave])
    assert names(topology, "rack") == [["a"], ["b"]]
    assert [domain.label for domain in topology.domains("rack")] == ["c/1@topology-rack", "c/1@nvlink.domain"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (f"{UUID}.0x7FFE", f"{UUID}.0x7ffe"),
        (f"{UUID.upper()}.7ffe", f"{UUID}.7ffe"),
        (f"{UUID}.32766", f"{UUID}.32766"),
        ("00000000-0000-0000-0000-000000000000.0", ""),
        ("[N/A]", ""),
        (" ", ""),
        ("Rack-A", "Rack-A"),
    ],
)
def test_clique_ids_may_be_hexadecimal_and_no_fabric_is_no_domain(value, name):
    assert domain_name(value) == name


@pytest.mark.parametrize(
    "key",
    ["accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", "topology.k8s.aws/ultraserver-id"],
)
def test_both_topograph_generations_and_vendor_keys_name_racks(key):
    topology = topology_from_labels("c", [LabelledNode("a", TRAY, {key: "x"}), LabelledNode("b", TRAY, {key: "y"})])
    assert [domain.label for domain in topology.domains("rack")] == ["c/x", "c/y"]


def test_ray_nodes_are_grouped_by_their_gpu_domain():
    nodes = [LabelledNode(f"n{n}", TRAY, {"ray.io/gpu-domain": f"d{n % 2}"}) for n in range(4)]
    assert names(topology_from_labels("ray", nodes, RAY_LEVEL_KEYS), "rack") == [["n0", "n2"], ["n1", "n3"]]


def test_levels_and_keys_are_settings():
    keys = {"tray-row": ("example.com/row",), "hall": ("example.com/hall",)}
    nodes = [LabelledNode(f"n{n}", TRAY, {"example.com/row": str(n // 2), "example.com/hall": "h"}) for n in range(4)]
    topology = topology_from_labels("c", nodes, keys)
    assert topology.levels == ("node", "tray-row", "hall", "cluster")


@pytest.mark.parametrize("keys", [{"rack": ()}, {"node": ("x",)}, {"cluster": ("x",)}])
def test_a_level_without_a_key_or_with_a_taken_name_is_an_error(keys):
    with pytest.raises(InvalidTopology, match="level_keys"):
        topology_from_labels("c", [node("a")], keys)


def test_a_node_name_twice_is_an_error():
    with pytest.raises(InvalidTopology, match="twice"):
        topology_from_labels("c", [node("a"), node("a")])


label = st.none() | st.sampled_from(["", "N/A", "1", "2", f"{UUID}.1", f"{UUID}.0XA"])
random_nodes = st.lists(
    st.dictionaries(st.sampled_from([key for keys in KUBERNETES_LEVEL_KEYS.values() for key in keys]), label),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(labels=random_nodes)
def test_nodes_share_a_rack_only_when_they_share_a_label(labels):
    nodes = [
        LabelledNode(f"n{n}", TRAY, {key: value for key, value in each.items() if value is not None})
        for n, each in enumerate(labels)
    ]
    by_name = {each.name: each for each in nodes}
    topology = topology_from_labels("c", nodes)
    assert sorted(each.name for each in topology.nodes) == sorted(by_name)
    if "rack" not in topology.levels:
        return
    for members in names(topology, "rack"):
        shared = [
            {(key, domain_name(by_name[member].labels.get(key, ""))) for key in KUBERNETES_LEVEL_KEYS["rack"]}
            for member in members
        ]
        assert any(name for _, name in set.intersection(*shared))
