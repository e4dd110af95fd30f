"""Topologies from TOML: what the shipped files say, and how every mistake is named."""

from pathlib import Path

import pytest

from reflux_placement.sources.toml import TopologyFileError, parse_cluster, read_cluster, read_topology
from reflux_placement.topology import Resources

CONFIGS = Path(__file__).parents[3] / "configs" / "topologies"
MACHINE = Resources(gpus=1, millicpus=2500, memory_bytes=8 << 30)
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


def test_the_local_file_describes_this_machine_as_a_toy_rack() -> None:
    topology = read_topology(CONFIGS / "local.toml", auto=MACHINE)
    assert [node.name for node in topology.nodes] == ["local"]
    assert topology.nodes[0].resources == MACHINE
    assert topology.domains("rack")[0].label == "local/block-1/rack-1"


def test_the_gb200_file_has_8_racks_of_72_gpus_in_2_blocks_with_rails_and_spares() -> None:
    cluster = read_cluster(CONFIGS / "gb200-8-racks.toml")
    topology = cluster.topology
    assert len(topology.domains("block")) == 2
    racks = topology.domains("rack")
    assert topology.sums(topology.capacity_NR[:, 0], topology.tightness("rack")).tolist() == [72] * 8
    assert topology.nodes[143].name == "gb144"
    assert topology.index_of("gb019") == racks[1].start
    assert len(topology.nodes[0].rails) == 4
    assert (cluster.spares.per_domain, cluster.spares.level) == (2, "rack")


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
def test_a_mistake_names_file_key_and_value(tmp_path: Path, old: str, new: str, key: str, value: object) -> None:
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(TopologyFileError) as caught:
        read_cluster(path, auto=MACHINE)
    assert (caught.value.path, caught.value.key, caught.value.value) == (str(path), key, value)
    assert str(path) in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nonsense [", "file"),
        ("", "cluster"),
        ('node_types = {}\nblock = []\n[cluster]\nname = "c"', "block"),
        ('[cluster]\nname = "c"\n[node_types]\n[[block]]\nname = "b"\nrack = []', "block[0].rack"),
        (GOOD + '[[block]]\nname = "b1"\n[[block.rack]]\nname="r"\nnode_type="tray"\nnodes=["x"]', "block[1].name"),
        (GOOD + '[[block.rack]]\nname = "r1"\nnode_type = "tray"\nnodes = ["x"]', "block[0].rack[1].name"),
    ],
)
def test_a_bad_structure_is_refused(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TopologyFileError) as caught:
        read_cluster(path, auto=MACHINE)
    assert caught.value.key == key


def test_a_missing_file_is_an_error_of_the_topology(tmp_path: Path) -> None:
    with pytest.raises(TopologyFileError, match="cannot be read"):
        read_cluster(tmp_path / "none.toml")


def test_any_levels_can_be_written_as_labels_and_a_node_may_have_none() -> None:
    cluster = parse_cluster(
        '[cluster]\nname = "c"\nlevels = ["clique", "row"]\n[node_types.t]\ncpus = 1\nmemory = "1GiB"\n'
        '[[nodes]]\nnames = ["a[1-2]"]\nnode_type = "t"\nlabels = {clique = "k", row = "r"}\n'
        '[[nodes]]\nnames = ["login"]\nnode_type = "t"\n'
    )
    assert cluster.topology.levels == ("node", "clique", "row", "cluster")
    assert [domain.label for domain in cluster.topology.domains("clique")] == ["c/r/k"]
    assert cluster.topology.domain_of("clique", cluster.topology.index_of("login")) is None


@pytest.mark.parametrize(
    ("spares", "key"),
    [
        ("per_domain = -1", "spares.per_domain"),
        ('level = "pod"', "spares.level"),
        ('nodes = ["n9"]', "spares.nodes"),
        ("count = 2", "spares.count"),
    ],
)
def test_bad_spares_are_named(spares: str, key: str) -> None:
    with pytest.raises(TopologyFileError) as caught:
        parse_cluster(GOOD + f"[spares]\n{spares}\n", auto=MACHINE)
    assert caught.value.key == key


def test_auto_needs_a_machine() -> None:
    with pytest.raises(TopologyFileError, match="write a number"):
        parse_cluster(GOOD.replace("cpus = 144", 'cpus = "auto"'))
