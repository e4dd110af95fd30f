"""What the Slurm backend asks for and how it reads the answers, for versions and states that no test cluster shows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_placement.sources.slurm_nodes import MIB, NodeRecord
from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.base import AgentLaunch, BackendAway, Grant, GrantRefused, NodeShare
from reflux_scheduler.backends.slurm import states
from reflux_scheduler.backends.slurm.backend import SlurmBackend
from reflux_scheduler.backends.slurm.client import JobRecord, complaint, parse_version
from reflux_scheduler.backends.slurm.commands import sbatch_argv
from reflux_scheduler.backends.slurm.job import comment, job_order, parse_comment
from reflux_scheduler.backends.slurm.launcher import agent_environment
from reflux_scheduler.backends.slurm.rest import RestClient, submission
from reflux_scheduler.backends.slurm.settings import SlurmSettings

OLD, NEW = (22, 5, 8), (25, 11, 0)
LAUNCH = AgentLaunch(("python", "-m", "agent"), {"REFLUX_STACK_SECRET": "s3", "PATH": "/opt/bin", "SLURM_JOB_ID": "7"})
RACK = [f"n{index:02d}" for index in range(8)]
LABELS = {node: "b1" if index < 4 else "b2" for index, node in enumerate(RACK)}


def order(shares, version=OLD, *, block=False, launch=LAUNCH, **settings):
    given_settings = SlurmSettings(**settings)
    wanted = Grant("job", 0, "t", tuple(shares))
    return job_order(wanted, launch, given_settings, version, LABELS, block=block, all_nodes=RACK), given_settings


def shares(*nodes, gpus=4, millicpus=1500, memory_bytes=0):
    return [NodeShare(node, Resources(gpus, millicpus, memory_bytes)) for node in nodes]


def test_equal_nodes_are_one_job_on_exactly_these_nodes():
    argv = sbatch_argv(*order(shares("n01", "n02")))
    assert {"--nodelist=n[01-02]", "--nodes=2", "--cpus-per-task=2", "--mem=256M", "--gres=gpu:4"} <= set(argv)
    assert {"--job-name=reflux-job-0", "--dependency=singleton", "--no-kill", "--no-requeue"} <= set(argv)
    assert ":" not in argv


def test_nodes_of_different_shapes_are_components_of_one_job_with_names_of_their_own():
    built, settings = order([*shares("n00", "n01"), *shares("n02", gpus=0, memory_bytes=1 << 30)])
    argv = sbatch_argv(built, settings)
    second = argv[argv.index(":") :]
    assert "--job-name=reflux-job-0.1" in second
    assert {"--nodelist=n02", "--mem=1024M"} <= set(second)
    assert not any(word.startswith("--gres") for word in second)
    assert built.script.count("--het-group=") == 2


def test_segments_are_asked_only_where_the_version_and_the_topology_have_them():
    new = sbatch_argv(*order(shares(*RACK[:4]), NEW, block=True, segment_size=2))
    assert {"--segment=2", "--exclude=n[04-07]"} <= set(new)
    assert not any(word.startswith("--nodelist") for word in new)
    for version, count, block in ((OLD, 4, True), (NEW, 3, True), (NEW, 4, False)):
        argv = sbatch_argv(*order(shares(*RACK[:count]), version, block=block, segment_size=2))
        assert not any(word.startswith("--segment") for word in argv), (version, count, block)


def test_switches_count_the_leaf_switches_of_the_nodes():
    assert "--switches=1" in sbatch_argv(*order(shares("n00", "n01"), switches=True))
    assert "--switches=2" in sbatch_argv(*order(shares("n00", "n07"), switches=True))
    assert not any("--switches" in word for word in sbatch_argv(*order(shares("n00", "stray"), switches=True)))


def test_what_an_operator_sets_is_asked_of_every_component():
    fields = {"partition": "gpu", "account": "lab", "qos": "high", "reservation": "r1", "constraint": "nvl72"}
    mixed = [*shares("n00"), *shares("n01", gpus=1)]
    argv = sbatch_argv(*order(mixed, time_limit_minutes=90, sbatch_options=("--exclusive=topo",), **fields))
    for word in (*(f"--{key}={value}" for key, value in fields.items()), "--time=90", "--exclusive=topo"):
        assert argv.count(word) == 2


def test_a_secret_is_neither_in_the_options_nor_in_the_script_and_no_outer_job_leaks_in():
    built, settings = order(shares("n00"), conf="/etc/slurm/slurm.conf")
    assert built.environment["REFLUX_STACK_SECRET"] == "s3"
    assert not any("s3" in word for word in (*sbatch_argv(built, settings), built.script))
    assert built.environment["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert "SLURM_JOB_ID" not in built.environment


@pytest.mark.parametrize("number", [38, 39, 40, 41, 43])
def test_a_rest_submission_pins_the_nodes_in_the_words_of_its_version(number):
    built, settings = order(shares("n01", "n02"), NEW, time_limit_minutes=5, partition="gpu")
    body = submission(built, settings, number)
    job = body["job"]
    assert (body if number <= 40 else job)["script"] == built.script
    assert (job["dependency"], job["partition"], job["tasks"], job["requeue"]) == ("singleton", "gpu", 2, False)
    if number == 38:
        assert (job["nodelist"], job["nodes"], job["gres"], job["no_kill"]) == ("n[01-02]", [2, 2], "gpu:4", "set")
        assert job["environment"]["REFLUX_STACK_SECRET"] == "s3"
    else:
        assert (job["required_nodes"], job["minimum_nodes"], job["maximum_nodes"]) == (["n01", "n02"], 2, 2)
        assert (job["tres_per_node"], job["kill_on_node_fail"]) == ("gres/gpu:4", False)
        assert "REFLUX_STACK_SECRET=s3" in job["environment"]
    mixed, settings = order([*shares("n01"), *shares("n02", gpus=1)])
    assert [job["name"] for job in submission(mixed, settings, number)["jobs"]] == ["reflux-job-0", "reflux-job-0.1"]


def test_options_of_sbatch_are_refused_with_slurmrestd():
    with pytest.raises(ValueError, match="sbatch_options"):
        RestClient(SlurmSettings(rest_url="http://x", sbatch_options=("--nice",)))


def test_schedulers_of_one_user_are_told_apart_by_their_prefix():
    built, _ = order(shares("n00"), job_prefix="refluxb")
    assert built.name == "refluxb-job-0"
    assert not built.name.startswith("reflux-")
    assert list(states.by_grant([record("RUNNING", name=f"{built.name}.1")])) == ["job-0"]
    with pytest.raises(ValueError, match="job_prefix"):
        SlurmSettings(job_prefix="reflux-b")


def test_a_grant_that_slurm_cannot_hold_in_a_job_is_refused():
    with pytest.raises(GrantRefused, match="without nodes"):
        order([])
    many = [NodeShare(f"m{n}", Resources(0, 1000, (300 + n) * MIB)) for n in range(129)]
    with pytest.raises(GrantRefused, match="129 different shapes"):
        order(many)
    with pytest.raises(GrantRefused, match="name"):
        job_order(Grant("a b", 0, "t", tuple(shares("n1"))), LAUNCH, SlurmSettings(), OLD, {}, block=False)


@given(st.integers(1, 8), st.integers(1, 200_000), st.integers(1, 10**13))
def test_a_comment_tells_after_a_restart_what_was_asked(gpus, millicpus, memory_bytes):
    built, _ = order(shares("n01", "n03", gpus=gpus, millicpus=millicpus, memory_bytes=memory_bytes))
    nodes, amount = parse_comment(comment(built.components[0]))
    assert nodes == ("n01", "n03")
    assert Resources(gpus, millicpus, memory_bytes).fits_in(amount)
    assert parse_comment("somebody's note") is None


def record(state, number=1, name="reflux-j-0", nodes=("n1", "n2"), asked=("n1", "n2"), reason=""):
    told = f"nodes={','.join(asked)} cpus=2 mem=100 gpus=1"
    return JobRecord(number, name, state, reason, nodes, asked, told)


ENDED = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "PREEMPTED",
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", "waiting"), ("CONFIGURING", "waiting"), ("RUNNING", "granted"), ("SUSPENDED", "granted"),
        ("COMPLETING", "granted"), *((each, "ended") for each in (*ENDED, "NEW_IN_SLURM_99")),
    ],
)  # fmt: skip
def test_every_state_of_a_job_is_one_of_a_grant(state, expected):
    status = states.grant_status("j-0", [record(state)])
    assert (status.state, status.native) == (expected, "slurm job 1")
    assert status.reason or state == "RUNNING"


def test_nodes_are_lost_when_slurm_takes_them_out_or_a_component_fails():
    shrunk = states.grant_status("j-0", [record("RUNNING", nodes=("n1",))])
    assert (shrunk.state, shrunk.lost_nodes) == ("granted", ("n2",))
    single = record("NODE_FAIL", 2, "reflux-j-0.1", nodes=("n3",), asked=("n3",))
    mixed = states.grant_status("j-0", [record("RUNNING"), single])
    assert (mixed.state, mixed.lost_nodes) == ("granted", ("n3",))
    ending = record("COMPLETING", 3, "reflux-j-0.2", nodes=("n4",), asked=("n4", "n5"))
    assert states.grant_status("j-0", [record("RUNNING"), ending]).lost_nodes == ("n4", "n5")
    assert states.grant_status("j-0", [single, ending]).lost_nodes == ()
    over = states.grant_status("j-0", [record("NODE_FAIL")])
    assert (over.state, over.lost_nodes) == ("ended", ("n1", "n2"))


def test_a_half_started_job_waits_and_a_later_double_is_told_apart():
    pending = record("PENDING", 2, "reflux-j-0.1", nodes=(), asked=("n3",), reason="Resources")
    assert states.grant_status("j-0", [record("RUNNING"), pending]).state == "waiting"
    late = record("PENDING", 9, nodes=())
    kept, extra = states.split_duplicates([record("COMPLETED"), pending, late])
    assert ([each.id for each in kept], [each.id for each in extra]) == ([1, 2], [9])
    assert list(states.by_grant([late, record("RUNNING", 4, "reflux-k-1.2")])) == ["k-1", "j-0"]


def node(state="IDLE", *flags, allocated=NOTHING, reason=""):
    return NodeRecord("n1", state, frozenset(flags), reason, Resources(4, 8000, 1 << 30), allocated)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (node(), "up"), (node("MIXED", "PLANNED"), "up"), (node("IDLE", "POWERED_DOWN"), "up"),
        (node("IDLE", "DRAIN"), "draining"), (node("IDLE", "REBOOT_REQUESTED"), "draining"),
        (node("IDLE", "RESERVED"), "draining"), (node("IDLE", "MAINTENANCE"), "draining"),
        (node("DOWN"), "down"), (node("ALLOCATED", "NOT_RESPONDING"), "down"), (node("UNKNOWN"), "down"),
    ],
)  # fmt: skip
def test_only_nodes_that_take_work_are_up(seen, expected):
    condition = states.condition(seen, NOTHING, avoid_foreign=True, reserved_is_ours=False)
    assert condition.state == expected
    assert bool(condition.reason) == (expected != "up")


def test_a_reservation_of_ours_is_open_to_us():
    seen = states.condition(node("IDLE", "RESERVED"), NOTHING, avoid_foreign=True, reserved_is_ours=True)
    assert seen.state == "up"


def test_what_is_ours_is_not_foreign_and_never_less_than_nothing():
    ours = states.held([record("RUNNING"), record("RUNNING"), record("COMPLETING", 2), record("COMPLETED", 3)])
    assert ours["n1"] == Resources(2, 4000, 200 * MIB)
    used = node("MIXED", allocated=Resources(2, 5000, 100 * MIB))
    seen = states.condition(used, ours["n1"], avoid_foreign=True, reserved_is_ours=False)
    assert (seen.state, seen.foreign) == ("up", Resources(0, 1000, 0))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            BackendAway,
        ),
        ("Batch job submission failed: Socket timed out on send/recv operation", BackendAway),
        ("QOSMaxSubmitJobPerUserLimit", BackendAway),
        ("Batch job submission failed: Requested node configuration is not available", GrantRefused),
        ("Batch job submission failed: Invalid account or account/partition combination specified", GrantRefused),
        ("", GrantRefused),
    ],
)
def test_a_complaint_that_passes_is_told_from_one_that_stays(said, kind):
    assert type(complaint("sbatch", said)) is kind


def test_versions_are_read_from_what_commands_and_slurmrestd_print():
    assert parse_version("slurm-wlm 22.05.8\n") == (22, 5, 8)
    assert parse_version("slurm 24.11.0-rc1") == (24, 11, 0)
    assert parse_version("?") == ()


async def test_slurm_that_is_not_installed_is_away_with_a_way_out():
    async with SlurmBackend(SlurmSettings(commands="/nonexistent"), LAUNCH) as backend:
        with pytest.raises(BackendAway, match="rest_url"):
            await backend.grants()
    async with SlurmBackend(SlurmSettings(rest_url="http://127.0.0.1:9"), LAUNCH) as backend:
        with pytest.raises(BackendAway, match="slurmrestd at"):
            await backend.grants()


async def test_a_topology_file_is_read_instead_of_asking_the_cluster(tmp_path):
    file = tmp_path / "topology.yaml"
    file.write_text("- topology: t\n  block: {block_sizes: [2, 4], blocks: [{block: b1, nodes: 'n[1-2]'}]}\n")
    backend = SlurmBackend(SlurmSettings(topology_file=str(file)), LAUNCH)
    assert await backend._topology_labels() == {
        "n1": {"rack": "b1", "block": "b1"},
        "n2": {"rack": "b1", "block": "b1"},
    }


def test_an_agent_is_reached_at_its_node_not_where_the_scheduler_is():
    own = {"SLURMD_NODENAME": "n7", "REFLUX_ADVERTISE_HOST": "control1", "REFLUX_STACK_SECRET": "s3"}
    seen = agent_environment(own, "node")
    assert (seen["REFLUX_AGENT_NODE"], seen["REFLUX_ADVERTISE_HOST"]) == ("n7", "n7")
    assert seen["REFLUX_AGENT_LISTEN"] == "0.0.0.0:0"
    assert agent_environment(own, "loopback") == {
        "SLURMD_NODENAME": "n7", "REFLUX_AGENT_NODE": "n7", "REFLUX_STACK_SECRET": "s3"
    }  # fmt: skip


def launcher(script: str, folder: Path, *parent: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", "-m", "reflux_scheduler.backends.slurm.launcher", "loopback", "/bin/sh", "-c"]
    environment = {**os.environ, "SLURMD_NODENAME": "n7", "T": str(folder)}
    return subprocess.Popen([*parent, *command, script], env=environment)


def gone(pid: int) -> bool:
    """Waits for the end of a process that is nobody's child here."""
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and b") Z " not in Path(f"/proc/{pid}/stat").read_bytes():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_the_launcher_starts_a_failed_agent_again_and_leaves_with_one_that_is_done(tmp_path):
    process = launcher('echo "$REFLUX_AGENT_NODE" >>$T/runs; [ "$(wc -l <$T/runs)" -ge 2 ] || exit 3', tmp_path)
    assert process.wait(30) == 0
    assert (tmp_path / "runs").read_text() == "n7\nn7\n"


STRAGGLER = """
(trap '' TERM; setsid sh -c 'echo $$ >$T/straggler; echo up >$T/up; while :; do sleep 600; done') &
echo $$ >$T/agent
wait
"""
"""An agent with a child that left its session and ignores SIGTERM, as a careless role would."""


@pytest.mark.slow
def test_the_launcher_ends_agent_and_stragglers_when_it_is_told_to_stop(tmp_path):
    os.mkfifo(tmp_path / "up")
    process = launcher(STRAGGLER, tmp_path)
    assert (tmp_path / "up").read_text() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert gone(int((tmp_path / "straggler").read_text()))


@pytest.mark.slow
def test_nothing_is_left_when_slurmstepd_dies_under_the_launcher(tmp_path):
    os.mkfifo(tmp_path / "up")
    stepd = (sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()")
    process = launcher(STRAGGLER, tmp_path, *stepd)
    assert (tmp_path / "up").read_text() == "up\n"
    process.kill()
    process.wait(30)
    assert gone(int((tmp_path / "agent").read_text()))
    assert gone(int((tmp_path / "straggler").read_text()))
