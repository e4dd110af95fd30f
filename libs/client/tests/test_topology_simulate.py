import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from reflux_client.commands.fleet import topology
from reflux_client.connection import ClientError

CLUSTERS = Path(__file__).parents[3] / "configs" / "clusters"
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
COMMAND = (sys.executable, "-m", "reflux_client.main", "topology", "simulate")


@pytest.fixture
def trace(tmp_path):
    """Eighty tasks of one GPU, one each half minute, four of them never started."""
    rows = [
        f"t{at},8000,16384,1,1000,,LS,Running,{at * 30},{at * 30 + 900},{'' if at % 20 == 9 else at * 30}"
        for at in range(80)
    ]
    path = tmp_path / "pods.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "four.toml"
    path.write_text('[cluster]\nname = "four"\n\n[grid]\nracks = 4\nnodes_per_rack = 6\nracks_per_block = 2\n')
    return path


def simulate(*arguments):
    return CliRunner().invoke(topology, ["simulate", *map(str, arguments)])


def test_a_trace_is_replayed_under_two_policies_and_the_last_line_is_json(trace, cluster, tmp_path):
    out = tmp_path / "report.html"
    result = simulate(
        "--trace", trace, "--cluster", cluster, "--compare", "slurm-block", "--seeds", 2, "--out", out, "--json"
    )
    assert result.exit_code == 0, result.output
    assert "RESAMPLED" in result.stdout
    assert "simulate 1/" in result.stderr
    data = json.loads(result.stdout.splitlines()[-1])
    assert data["cluster"] == {"name": "four", "nodes": 24, "gpus": 96}
    assert data["seeds"] == [0, 1]
    assert list(data["policies"]) == ["reflux", "slurm-block"]
    assert all(row["unfinished"]["value"] == 0 for row in data["policies"].values())
    assert len(data["vs_best"]["jct_mean"]) == 2
    text = out.read_text()
    assert text.count("<svg") == 5 + len(data["policies"])
    assert "RESAMPLED" in text
    assert "<script" not in text
    for loads in ('src="http', 'href="http', "@import", "url(http"):
        assert loads not in text


def test_the_same_seed_gives_the_same_figures(trace, cluster):
    runs = [simulate("--trace", trace, "--cluster", cluster, "--seed", seed, "--json") for seed in (4, 4, 5)]
    figures = [json.loads(run.stdout.splitlines()[-1])["policies"] for run in runs]
    assert figures[0] == figures[1]
    assert figures[0] != figures[2]


def test_synthetic_jobs_of_roles_need_no_trace(cluster):
    result = simulate("--trace", "rl-mix", "--cluster", cluster, "--policy", "fifo-first-fit", "--jobs", 20)
    assert result.exit_code == 0, result.output
    assert "SYNTHETIC" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "nowhere.csv"), "nowhere.csv: does not exist"),
        (("--policy", "best"), "'best' does not exist; there is reflux, reflux-defaults, fifo-first-fit"),
        (("--sizes", "big"), "--sizes big: there is log2, acme, trace"),
        (("--load", "0"), "--load 0.0: write a share above zero"),
        (("--seeds", "0"), "--seeds 0: write a number of one or more"),
        (("--cluster", "nowhere.toml"), "nowhere.toml: does not exist"),
        (("--out", "no/such/folder/report.html"), "does not exist"),
    ],
)
def test_a_wrong_argument_is_one_sentence_that_says_what_would_work(trace, cluster, arguments, words):
    result = simulate("--trace", trace, "--cluster", cluster, *arguments)
    assert isinstance(result.exception, ClientError)
    assert words in str(result.exception)


def test_a_bad_line_of_the_trace_ends_the_command_with_status_2(trace, cluster):
    trace.write_text(trace.read_text() + "t80,8000,16384,two,1000,,LS,Running,1,2,1\n")
    done = subprocess.run(
        [*COMMAND, "--trace", trace, "--cluster", cluster], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"reflux: {trace}, line 82: num_gpu = 'two' is not a number of zero or more\n"


def test_an_interrupt_ends_a_long_simulation_without_a_traceback():
    arguments = ("--trace", "rl-mix", "--cluster", CLUSTERS / "gb200-1400-racks.toml", "--jobs", "5000")
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    assert process.stderr.readline().startswith("simulate 1/1: reflux")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait(timeout=60) == 130
    assert time.monotonic() - started < 30
    assert process.stderr.read().strip() == "reflux: interrupted"
