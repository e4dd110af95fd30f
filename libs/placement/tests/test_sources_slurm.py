"""Slurm's own notations: hostlists, topology files, and what its commands print."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.errors import InvalidTopology
from reflux_placement.sources.hostlist import compress, expand
from reflux_placement.sources.slurm import parse_topology_text, parse_topology_yaml, slurm_topology
from reflux_placement.sources.slurm_nodes import MIB, gpu_count, parse_nodes_json, parse_nodes_text
from reflux_placement.topology import Resources

TREE = """
# racks below two leaf groups
SwitchName=l1 Nodes=gb[001-002]
SwitchName=l2 Nodes=gb[003-004] LinkSpeed=100
switchname=s0 switches=l[1-2]
"""
PRINTED_TREE = """\
SwitchName=rack0 Level=0 LinkSpeed=1 Nodes=r0n[0-1]
SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=r1n[0-1]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=r0n[0-1],r1n[0-1] Switches=rack[0-1]
"""
BLOCKS = """
BlockName=b1 Nodes=gb[01-02]
BlockName=b2 Nodes=gb[03-04]
BlockName=b3 Nodes=gb[05-06]
BlockSizes=2,4
"""
PRINTED_BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=gb[01-02] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=gb[03-04] BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=gb[05-06] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=gb[01-04] BlockSize=4
"""
NODE = (
    "NodeName=r0n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=2 CPUEfctv=6 CPUTot=8 CPULoad=0.49 "
    "AvailableFeatures=rack0,nvl72 ActiveFeatures=rack0 Gres=gpu:gb200:4(S:0-1),nic:2 GresDrain=N/A "
    "GresUsed=gpu:gb200:3(IDX:0-2) NodeAddr=10.0.0.1 NodeHostName=vm Port=45345 Version=22.05.8 "
    "OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=16000 AllocMem=1000 FreeMem=17483 "
    "State={state} ThreadsPerCore=1 MemSpecLimit=1000 Partitions=gpu,debug "
    "Reason=fan is broken [root@2026-11-30T16:10:46]"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gb[001-003,010],login", ["gb001", "gb002", "gb003", "gb010", "login"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("n[8-10]-ib, m1", ["n8-ib", "n9-ib", "n10-ib", "m1"]),
        ("", []),
    ],
)
def test_a_hostlist_names_its_nodes_in_order(text, names):
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[3-1]", "n[1", "n1]", "n[a-b]", "n[[1]]", "n[0-99999999]", "n[1];reboot", "a b"])
def test_a_broken_hostlist_is_refused_not_guessed(text):
    with pytest.raises(InvalidTopology):
        expand(text)


WORDS = st.from_regex(r"[a-z]{1,3}[0-9]{0,4}(-ib)?", fullmatch=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, unique=True, max_size=40))
def test_compressing_and_expanding_gives_the_same_nodes(names):
    assert sorted(expand(compress(names))) == sorted(names)


def test_neighbours_share_one_bracket():
    assert compress([f"r0n{n}" for n in range(12)]) == "r0n[0-11]"
    assert compress(["gb008", "gb009", "gb010", "gb100"]) == "gb[008-010,100]"
    assert compress(["login", "n3"]) == "n3,login"


def test_leaf_switches_become_racks():
    labels = parse_topology_text(TREE)
    assert labels["gb002"] == {"rack": "l1", "block": "s0"}
    racks = {node: domains["rack"] for node, domains in labels.items()}
    assert racks == {"gb001": "l1", "gb002": "l1", "gb003": "l2", "gb004": "l2"}


def test_what_scontrol_prints_of_a_tree_equals_the_file():
    file = "SwitchName=rack0 Nodes=r0n[0-1]\nSwitchName=rack1 Nodes=r1n[0-1]\nSwitchName=spine Switches=rack[0-1]"
    assert parse_topology_text(PRINTED_TREE) == parse_topology_text(file)
    assert parse_topology_text(PRINTED_TREE)["r1n0"] == {"rack": "rack1", "block": "spine"}


def test_base_blocks_become_racks_and_aggregated_ones_the_level_above():
    labels = parse_topology_text(BLOCKS)
    assert labels["gb02"] == {"rack": "b1", "block": "b[1-2]"}
    assert labels["gb05"] == {"rack": "b3", "block": "b3"}
    printed = parse_topology_text(PRINTED_BLOCKS)
    assert printed["gb02"] == labels["gb02"]
    assert printed["gb05"] == {"rack": "b3"}


YAML = [
    {
        "topology": "racks",
        "cluster_default": True,
        "block": {
            "block_sizes": [2, 4],
            "blocks": [{"block": "b1", "nodes": "gb[01-02]"}, {"block": "b2", "nodes": "gb[03-04]"}],
        },
    },
    {
        "topology": "fabric",
        "tree": {"switches": [{"switch": "s0", "children": "l[1-2]"}, {"switch": "l1", "nodes": "gb[01-03]"},
                              {"switch": "l2", "nodes": "gb04"}]},
    },
    {"topology": "none", "flat": True},
    {"topology": "cube", "torus3d": {}},
]  # fmt: skip


def test_a_yaml_topology_is_the_default_one_or_the_named_one():
    assert parse_topology_yaml(YAML)["gb03"] == {"rack": "b2", "block": "b[1-2]"}
    assert parse_topology_yaml(YAML, "fabric")["gb03"] == {"rack": "l1", "block": "s0"}
    assert parse_topology_yaml(YAML, "none") == {}
    assert parse_topology_yaml([]) == {}
    for name in ("cube", "missing"):
        with pytest.raises(InvalidTopology):
            parse_topology_yaml(YAML, name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "below itself"),
        ("SwitchName=a Switches=b", "not defined"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "two switches"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "twice"),
        ("SwitchName=a Nodes=n1\nSwitchName=s Switches=a\nSwitchName=t Switches=a", "two switches"),
        ("BlockName=a Nodes=n1\nBlockName=b Nodes=n1", "two blocks"),
        ("BlockName=a Nodes=n[1-2]\nBlockSizes=2,3", "multiple"),
    ],
)
def test_a_topology_that_contradicts_itself_is_refused(text, problem):
    with pytest.raises(InvalidTopology, match=problem):
        parse_topology_text(text)


def test_levels_without_a_name_are_an_error_unless_they_are_the_whole_cluster():
    chain = (
        "SwitchName=l0 Nodes=n[1-2]\nSwitchName=l1 Switches=l0\nSwitchName=l2 Switches=l1\nSwitchName=l3 Switches=l2"
    )
    assert parse_topology_text(chain)["n1"] == {"rack": "l0", "block": "l1", "zone": "l2"}
    two = (
        chain
        + "\nSwitchName=m0 Nodes=m1\nSwitchName=m1 Switches=m0\nSwitchName=m2 Switches=m1\nSwitchName=m3 Switches=m2"
    )
    with pytest.raises(InvalidTopology, match="levels"):
        parse_topology_text(two)
    assert parse_topology_text(two, ("rack", "row", "hall", "site"))["m1"]["site"] == "m3"


def test_a_switch_without_nodes_is_no_domain():
    labels = parse_topology_text("SwitchName=empty\nSwitchName=l1 Nodes=n1\nSwitchName=s Switches=empty,l1")
    assert labels == {"n1": {"rack": "l1", "block": "s"}}


def test_a_cluster_without_topology_has_no_labels():
    assert parse_topology_text("No topology information available\n") == {}


@pytest.mark.parametrize(
    ("state", "base", "flags"),
    [
        ("IDLE", "IDLE", set()),
        ("MIXED+DRAIN", "MIXED", {"DRAIN"}),
        ("DOWN*+DRAIN", "DOWN", {"DRAIN", "NOT_RESPONDING"}),
        ("ALLOCATED*", "ALLOCATED", {"NOT_RESPONDING"}),
        ("IDLE+DRAIN+NOT_RESPONDING", "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        ("DRAINED", "IDLE", {"DRAIN"}),
    ],
)
def test_a_node_line_tells_room_load_and_state(state, base, flags):
    (node,) = parse_nodes_text(NODE.format(state=state))
    assert (node.name, node.state, node.flags) == ("r0n1", base, flags)
    assert node.capacity == Resources(4, 6000, 15000 * MIB)
    assert node.allocated == Resources(3, 2000, 1000 * MIB)
    assert (node.reason, node.features, node.partitions) == ("fan is broken", ("rack0",), ("gpu", "debug"))


def test_json_of_old_and_new_versions_tells_the_same():
    old = {"name": "n1", "state": "idle", "state_flags": ["DRAIN"], "cpus": 8, "real_memory": 16000, "alloc_cpus": 2,
           "alloc_memory": 1000, "gres": "gpu:gb200:4", "gres_used": "gpu:gb200:2(IDX:0-1)", "features": "rack0,nvl72",
           "partitions": ["gpu"], "reason": "fan"}  # fmt: skip
    new = {**old, "state": ["IDLE", "DRAIN"], "features": ["rack0", "nvl72"], "effective_cpus": 8,
           "real_memory": {"set": True, "number": 16000}}  # fmt: skip
    del new["state_flags"]
    assert parse_nodes_json({"nodes": [old]}) == parse_nodes_json({"nodes": [new]})
    assert parse_nodes_json({"nodes": [old]})[0].allocated.gpus == 2
    with pytest.raises(InvalidTopology):
        parse_nodes_json({"errors": []})


def test_only_gpus_count_as_gpus():
    assert gpu_count("gpu:gb200:4(S:0-1),nic:2") == 4
    assert gpu_count("cpu=8,mem=1000M,gres/gpu=3,billing=8") == 3
    assert gpu_count("cpu=8,gres/gpu:a100=2") == 2
    assert gpu_count("gpu:a:2,gpu:b:1") == 3
    assert gpu_count("(null)") == 0


def test_nodes_of_one_partition_become_a_tree_and_unlabelled_ones_belong_nowhere():
    other = NODE.format(state="IDLE").replace("r0n1", "x9").replace("gpu,debug", "debug")
    stray = NODE.format(state="IDLE").replace("r0n1", "stray")
    nodes = parse_nodes_text("\n".join([NODE.format(state="IDLE"), other, stray]))
    topology = slurm_topology("emu", nodes, parse_topology_text(PRINTED_TREE), partition="gpu")
    assert [node.name for node in topology.nodes] == ["r0n1", "stray"]
    assert topology.domain_of("rack", 1) is None
    assert topology.domain_of("rack", 0).label == "emu/spine/rack0"
    with pytest.raises(InvalidTopology):
        slurm_topology("emu", nodes, {}, partition="missing")


def test_hostlists_agree_with_slurm_itself(tmp_path):
    scontrol = next((path for path in ("/usr/bin/scontrol", "/usr/local/bin/scontrol") if Path(path).exists()), None)
    if scontrol is None:
        pytest.skip("Slurm is not installed (scontrol missing): deploy/setup.sh installs it as root")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=ALL\n")
    for text in ("gb[001-003,010],login", "r[0-1]n[0-1]", "n[8-10],n[08-10]"):
        done = subprocess.run(
            [scontrol, "show", "hostnames", text],
            env={"SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == expand(text)
