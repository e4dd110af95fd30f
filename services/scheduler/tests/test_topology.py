from pathlib import Path

import pytest

from reflux_scheduler.errors import InvalidTopology, TopologyFileError
from reflux_scheduler.topology import UNLIMITED, Node, Resources, TopologyBuilder, total
from reflux_scheduler.topology_file import Machine, load_topology, toy_rack

CONFIGS = Path(__file__).parents[3] / "configs" / "topologies"
MACHINE = Machine(Resources(gpus=1, millicpus=2500, memory_bytes=8 << 30))
GOOD = """
[cluster]
name = "c"
[node_types.tray]
gpus = 4
cpus = 144
memory = "960GiB"
[[block]]
name = "b1"
[[block.rack]]
name = "r1"
node_type = "tray"
nodes = ["n[1-3]", "extra"]
"""


def test_local_file_describes_this_machine_as_a_toy_rack():
    topology = load_topology(CONFIGS / "local.toml", MACHINE)
    assert topology == toy_rack(MACHINE)
    assert [node.name for node in topology.nodes] == ["local"]
    assert topology.nodes[0].resources == MACHINE.resources
    assert topology.domains("rack")[0].label == "local/block-1/rack-1"


def test_this_machine_has_cpus_and_memory():
    machine = Machine.this()
    assert machine.resources.millicpus >= 1000
    assert machine.resources.memory_bytes > 1 << 28


def test_gb200_file_has_8_racks_of_72_gpus_in_2_blocks():
    topology = load_topology(CONFIGS / "gb200-8-racks.toml")
    assert len(topology.domains("block")) == 2
    racks = topology.domains("rack")
    assert [total(topology.totals, rack).gpus for rack in racks] == [72] * 8
    assert [len(rack.indices) for rack in racks] == [18] * 8
    assert topology.nodes[143].name == "gb144"
    assert topology.index_of("gb019") == racks[1].start


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ('"extra"', '"n2"', "block[0].rack[0].nodes", "n2"),
        ('nodes = ["n[1-3]", "extra"]', "nodes = []", "block[0].rack[0].nodes", []),
        ('nodes = ["n[1-3]", "extra"]', 'nodes = ["n[3-1]"]', "block[0].rack[0].nodes", "n[3-1]"),
        ('nodes = ["n[1-3]", "extra"]', 'nodes = "n1"', "block[0].rack[0].nodes", "n1"),
        ('nodes = ["n[1-3]", "extra"]', "nodes = [1]", "block[0].rack[0].nodes", 1),
        ('"extra"', '"a b"', "block[0].rack[0].nodes", "a b"),
        ("gpus = 4", "gpus = -1", "node_types.tray.gpus", -1),
        ("gpus = 4", "gpus = true", "node_types.tray.gpus", True),
        ("gpus = 4", "gpu = 4", "node_types.tray.gpu", 4),
        ("cpus = 144", "cpus = 0", "node_types.tray.cpus", 0),
        ("cpus = 144", 'cpus = "many"', "node_types.tray.cpus", "many"),
        ("cpus = 144", "", "node_types.tray.cpus", None),
        ('memory = "960GiB"', 'memory = "960 GB"', "node_types.tray.memory", "960 GB"),
        ('node_type = "tray"', 'node_type = "trey"', "block[0].rack[0].node_type", "trey"),
        ('name = "b1"', 'name = "b1"\nlevel = 3', "block[0].level", 3),
        ('[cluster]\nname = "c"', '[cluster]\nname = ""', "cluster.name", ""),
        ('[cluster]\nname = "c"', "", "cluster", None),
        ('[cluster]\nname = "c"', 'cluster = "c"', "cluster", "c"),
    ],
)
def test_bad_file_names_file_key_and_value(tmp_path, old, new, key, value):
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(TopologyFileError) as caught:
        load_topology(path, MACHINE)
    assert (caught.value.path, caught.value.key, caught.value.value) == (str(path), key, value)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nonsense [", "file"),
        ("", "block"),
        ('node_types = {}\nblock = []\n[cluster]\nname = "c"', "block"),
        ('[cluster]\nname = "c"\n[node_types]\n[[block]]\nname = "b"\nrack = []', "block[0].rack"),
        (GOOD + '[[block]]\nname = "b1"\n[[block.rack]]\nname="r"\nnode_type="tray"\nnodes=["x"]', "block[1].name"),
        (GOOD + '[[block.rack]]\nname = "r1"\nnode_type = "tray"\nnodes = ["x"]', "block[0].rack[1].name"),
    ],
)
def test_bad_structure_is_refused(tmp_path, text, key):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TopologyFileError) as caught:
        load_topology(path, MACHINE)
    assert caught.value.key == key


def test_missing_file_is_a_topology_error(tmp_path):
    with pytest.raises(TopologyFileError, match="cannot be read"):
        load_topology(tmp_path / "none.toml", MACHINE)


def test_racks_of_different_blocks_may_share_a_name():
    builder = TopologyBuilder("c")
    builder.add_rack("b1", "r", [Node("n1", Resources(1))])
    builder.add_rack("b2", "r", [Node("n2", Resources(1))])
    assert [rack.label for rack in builder.build().domains("rack")] == ["c/b1/r", "c/b2/r"]


def test_a_tree_without_blocks_is_refused():
    with pytest.raises(InvalidTopology):
        TopologyBuilder("c").build()


def test_copies_count_the_scarcest_resource():
    assert Resources(1, 500, 10).copies_in(Resources(4, 1600, 1000)) == 3
    assert Resources().copies_in(Resources()) == UNLIMITED
    assert Resources(1).copies_in(Resources(-1, -1, -1)) == 0
