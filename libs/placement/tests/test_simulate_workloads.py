from pathlib import Path

import numpy as np
import pytest

from reflux_placement.simulate.clusters import ListedNode, grid, racked
from reflux_placement.simulate.files import InputError, read_cluster, read_nodes, read_tasks
from reflux_placement.simulate.load import offered_load, scale_arrivals
from reflux_placement.simulate.openb import Task, openb_workload
from reflux_placement.simulate.policies import UnknownPolicy, chosen
from reflux_placement.simulate.rl_mix import rl_workload
from reflux_placement.topology import Resources

TASK_HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
)
NODE_HEADER = "sn,cpu_milli,memory_mib,gpu,model"
RACKS_32 = grid("racks", racks=32)
ONE = Resources(1, 1_000, 1 << 30)


def tasks(count, seconds=600.0):
    return [Task(f"t{at}", float(at * 60), seconds, ONE) for at in range(count)]


def test_tasks_are_read_with_their_run_times_and_those_that_never_started_without(tmp_path):
    path = tmp_path / "pods.csv"
    rows = ["a,12000,16384,1,460,,LS,Running,10,100,30", "b,6000,12288,0,0,,LS,Pending,20,90,"]
    path.write_text("\n".join([TASK_HEADER, *rows]) + "\n")
    first, second = read_tasks(path)
    assert (first.arrives_at, first.seconds, first.each) == (10, 70, Resources(1, 12_000, 16_384 << 20))
    assert (second.seconds, second.each.gpus) == (None, 0)


@pytest.mark.parametrize(
    ("row", "where", "what"),
    [
        ("a,12000,16384,one,460,,LS,Running,10,100,30", "line 2", "num_gpu = 'one'"),
        ("a,12000,16384,1,460,,LS,Running,10,30,30", "line 2", "not after scheduled_time"),
        ("a,12000,16384,1,460,,LS,Running,-5,100,30", "line 2", "creation_time = '-5'"),
        ("a,12000,16384,1,460,,LS,Running,nan,100,30", "line 2", "creation_time = 'nan'"),
        ("a,12000", "line 2", "fewer than"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_with_file_line_and_column(tmp_path, row, where, what):
    path = tmp_path / "pods.csv"
    path.write_text(f"{TASK_HEADER}\n{row}\n")
    with pytest.raises(InputError) as caught:
        read_tasks(path)
    assert f"{path}, {where}" in str(caught.value)
    assert what in str(caught.value)


def test_files_that_are_missing_empty_or_of_another_kind_are_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_tasks(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="column 'sn' is missing; the file has a, b"):
        read_nodes(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text(NODE_HEADER + "\n")
    with pytest.raises(InputError, match="no rows"):
        read_nodes(tmp_path / "empty.csv")
    (tmp_path / "bad.toml").write_text("[grid\n")
    with pytest.raises(InputError, match="no TOML"):
        read_cluster(tmp_path / "bad.toml")
    (tmp_path / "key.toml").write_text("[grid]\nrakcs = 3\n")
    with pytest.raises(InputError, match=r"grid\.rakcs.*unknown key; known here: .*racks"):
        read_cluster(tmp_path / "key.toml")
    (tmp_path / "zero.toml").write_text("[grid]\nracks = 0\n")
    with pytest.raises(InputError, match=r"grid\.racks.*above zero"):
        read_cluster(tmp_path / "zero.toml")


def test_a_list_of_nodes_gets_racks_of_equal_nodes(tmp_path):
    rows = [f"n{at},96000,393216,{8 if at % 2 else 2},{'G2' if at % 2 else 'T4'}" for at in range(40)]
    (tmp_path / "nodes.csv").write_text("\n".join([NODE_HEADER, *rows]))
    (tmp_path / "cluster.toml").write_text('[node_list]\nfile = "nodes.csv"\nnodes_per_rack = 8\nracks_per_block = 4\n')
    topology = read_cluster(tmp_path / "cluster.toml")
    assert [len(rack.indices) for rack in topology.domains("rack")] == [8, 8, 4, 8, 8, 4]
    assert [len(block.indices) for block in topology.domains("block")] == [28, 12]
    for rack in topology.domains("rack"):
        assert len({topology.nodes[node].resources for node in rack.indices}) == 1


def test_the_clusters_of_the_repository_have_the_sizes_that_their_comments_say():
    folder = Path(__file__).parents[3] / "configs" / "clusters"
    sizes = {}
    for name in ("gb200-32-racks", "gb200-1400-racks"):
        topology = read_cluster(folder / f"{name}.toml")
        counts = [len(topology.domains(level)) for level in ("rack", "block")]
        sizes[name] = (topology.num_nodes, int(topology.capacity_NR[:, 0].sum()), *counts)
    assert sizes == {"gb200-32-racks": (576, 2_304, 32, 4), "gb200-1400-racks": (25_200, 100_800, 1_400, 175)}


def test_sizes_are_drawn_as_they_say_and_the_notes_say_that_they_were():
    big = grid("big", racks=200)
    log2 = openb_workload(tasks(4_000), big, sizes="log2", seed=1)
    acme = openb_workload(tasks(12_000), big, sizes="acme", seed=1)
    counts = np.array([job.gpus for job in log2.jobs])
    assert np.median(counts) == pytest.approx(32, rel=0.15)
    assert counts.mean() == pytest.approx(1023 / np.log(1024), rel=0.1)
    assert 900 < counts.max() <= 1024
    counts = np.array([job.gpus for job in acme.jobs])
    assert np.median(counts) == 1
    assert counts.mean() == pytest.approx(26.8, rel=0.15)
    assert "RESAMPLED (log2-uniform over 1..1024, seed 1)" in log2.notes[0]
    assert "RESAMPLED" not in openb_workload(tasks(10), big, sizes="trace").notes[0]


def test_no_gang_is_larger_than_half_of_the_cluster_and_tasks_without_gpus_stay_single():
    small = racked(
        "s", [ListedNode(f"n{at}", "G2", ONE.times(8)) for at in range(10)], nodes_per_rack=5, racks_per_block=2
    )
    rows = [*tasks(300), Task("cpu", 0.0, 5.0, Resources(0, 500, 1 << 20))]
    jobs = openb_workload(rows, small, seed=2).jobs
    assert max(job.gpus for job in jobs) == 40
    assert next(job for job in jobs if job.name == "cpu").gang.roles[0].count == 1


def test_tasks_that_never_started_keep_their_arrival_and_get_a_run_time_of_a_task_of_their_kind():
    rows = [*tasks(5, seconds=70.0), Task("never", 33.0, None, ONE), Task("cpu", 1.0, 9.0, Resources(0, 500, 0))]
    workload = openb_workload(rows, RACKS_32)
    never = next(job for job in workload.jobs if job.name == "never")
    assert (never.arrives_at, never.seconds) == (33.0, 70.0)
    assert "1 tasks never started" in workload.notes[1]


def test_arrivals_are_scaled_to_the_wanted_load_and_keep_their_order_and_run_times():
    jobs = openb_workload(tasks(500), RACKS_32, seed=0).jobs
    scaled, factor = scale_arrivals(jobs, RACKS_32, 0.7)
    assert offered_load(scaled, RACKS_32) == pytest.approx(0.7, rel=1e-6)
    assert [job.seconds for job in scaled] == [job.seconds for job in jobs]
    assert scaled[7].arrives_at == pytest.approx(jobs[7].arrives_at * factor)
    with pytest.raises(ValueError, match="cannot offer"):
        scale_arrivals(jobs, RACKS_32, 1e9)


def test_the_synthetic_mix_offers_its_load_from_the_start_on():
    jobs = rl_workload(RACKS_32, jobs=4_000, load=0.8, seed=0).jobs
    assert offered_load(jobs, RACKS_32) == pytest.approx(0.8, rel=0.15)
    standing = sum(job.gpus for job in jobs if job.arrives_at == 0)
    assert 0.5 * 2_304 < standing <= 0.8 * 2_304


def test_learners_of_several_racks_come_in_segments_and_every_gang_names_known_levels():
    for job in rl_workload(RACKS_32, jobs=300, seed=0, scale=2).jobs:
        job.gang.check_levels(RACKS_32)
        learner = job.gang.demand("learner")
        assert learner.segment_size == (16 if learner.count > 16 else 0)


def test_an_unknown_policy_is_told_which_there_are():
    with pytest.raises(UnknownPolicy, match="'best' does not exist; there is reflux, "):
        chosen(["reflux", "best"])
    assert next(iter(chosen(["reflux", "all", "reflux"]))) == "reflux"


def test_clusters_that_list_their_racks_are_read_too():
    folder = Path(__file__).parents[3] / "configs" / "topologies"
    topology = read_cluster(folder / "gb200-8-racks.toml")
    assert (topology.num_nodes, len(topology.domains("rack"))) == (144, 8)
    with pytest.raises(ValueError, match=r"local\.toml.*auto"):
        read_cluster(folder / "local.toml")
