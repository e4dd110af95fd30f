"""The Slurm backend on a real Slurm: eight slurmd on loopback, two racks, null devices as GPUs.

Agents are small shells here that note what they were given; the last tests run the real one.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import Layout, SlurmCluster, slurm_cluster, why_not

from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.base import AgentLaunch, BackendAway, Grant, GrantRefused, GrantStatus, NodeShare
from reflux_scheduler.backends.slurm.backend import SlurmBackend
from reflux_scheduler.backends.slurm.settings import SlurmSettings

MIB = 1 << 20
HANG_SECONDS = 60
SECRET = "not-for-command-lines"
NOTE = (
    'echo "$REFLUX_AGENT_NODE $REFLUX_AGENT_GRANT [$CUDA_VISIBLE_DEVICES] $REFLUX_STACK_SECRET"'
    ' >"$NOTES/$REFLUX_AGENT_GRANT.$REFLUX_AGENT_NODE"'
)
AGENT = ("/bin/sh", "-c", f"{NOTE}; exec sleep 600")
DOOMED = "doomed-0"
RACK1 = ("r1n0", "r1n1", "r1n2", "r1n3")
"""Not the nodes that Slurm would take by itself."""

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(Layout(), rest=True) as cluster:
        (cluster.folder / "notes").mkdir()
        yield cluster


@pytest.fixture(scope="module")
def doomed(cluster):
    """Slurm takes its time to miss a node: it is lost early, a late test looks at what was reported."""

    async def place() -> None:
        async with backend_of(cluster) as backend:
            wanted = grant(DOOMED, "r1n2", "r1n3")
            await granted(backend, wanted)
            await notes(cluster, wanted)

    asyncio.run(place())
    cluster.kill("r1n3")


def settings_of(cluster: SlurmCluster, **changes) -> SlurmSettings:
    return SlurmSettings(conf=str(cluster.conf), work_dir=str(cluster.folder), agent_host="loopback", **changes)


def backend_of(cluster: SlurmCluster, *, argv: tuple[str, ...] = AGENT, environment=(), **changes) -> SlurmBackend:
    given = {"NOTES": f"{cluster.folder}/notes", "REFLUX_STACK_SECRET": SECRET, "PATH": os.environ["PATH"]}
    return SlurmBackend(settings_of(cluster, **changes), AgentLaunch(argv, {**given, **dict(environment)}))


@pytest.fixture
async def backend(cluster):
    async with backend_of(cluster) as backend:
        yield backend
        await release_all(backend)


async def release_all(backend: SlurmBackend) -> None:
    for grant_id, status in (await backend.grants()).items():
        if grant_id != DOOMED and status.state != "ended":
            await backend.release(grant_id)
            await gone(grant_id)


def grant(name: str, *nodes: str, gpus: int = 2, cpus: int = 1, memory_mib: int = 300) -> Grant:
    job, part = name.rsplit("-", 1)
    size = Resources(gpus, cpus * 1000, memory_mib * MIB)
    return Grant(job, int(part), "test", tuple(NodeShare(node, size, tuple(range(gpus))) for node in nodes))


async def until(backend: SlurmBackend, grant_id: str, condition) -> GrantStatus:
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            status = (await backend.grants()).get(grant_id)
            if status is not None and condition(status):
                return status
            await asyncio.sleep(0.05)


async def granted(backend: SlurmBackend, wanted: Grant) -> GrantStatus:
    await backend.request(wanted)
    status = await until(backend, wanted.id, lambda status: status.state != "waiting")
    assert status.state == "granted", status
    return status


def processes(grant_id: str) -> dict[int, str]:
    """Command lines of all processes of a grant, by pid: everything below its agents carries its id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"REFLUX_AGENT_GRANT={grant_id}\0".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


async def gone(grant_id: str) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while processes(grant_id):
            await asyncio.sleep(0.05)


async def notes(cluster: SlurmCluster, wanted: Grant) -> dict[str, str]:
    """What every agent of a grant was given, by node."""
    paths = {share.node: cluster.folder / "notes" / f"{wanted.id}.{share.node}" for share in wanted.shares}
    async with asyncio.timeout(HANG_SECONDS):
        while not all(path.exists() and path.read_text().endswith("\n") for path in paths.values()):
            await asyncio.sleep(0.05)
    return {node: path.read_text().strip() for node, path in paths.items()}


def agents_of(cluster: SlurmCluster, grant_id: str) -> set[str]:
    return {path.name.rpartition(".")[2] for path in (cluster.folder / "notes").glob(f"{grant_id}.*")}


async def test_the_topology_is_the_clusters_own(backend):
    topology = await backend.discover()
    assert topology.name == "emu"
    assert [domain.label for domain in topology.domains("rack")] == ["emu/spine/rack0", "emu/spine/rack1"]
    assert [node.name for node in topology.nodes][:4] == ["r0n0", "r0n1", "r0n2", "r0n3"]
    assert topology.nodes[0].resources == Resources(4, 8000, 16000 * MIB)


async def test_a_gang_gets_exactly_its_nodes_and_each_agent_its_gpus(cluster, backend):
    wanted = grant("gang-0", *RACK1, gpus=4)
    status = await granted(backend, wanted)
    assert status.native.startswith("slurm job ")
    assert status.lost_nodes == ()
    seen = await notes(cluster, wanted)
    assert seen == {node: f"{node} gang-0 [0,1,2,3] {SECRET}" for node in RACK1}
    assert cluster.run("squeue", "-h", "-n", "reflux-gang-0", "-o", "%N").strip() == "r1n[0-3]"


async def test_a_drained_node_is_told_and_a_grant_on_it_waits_with_the_reason(cluster, backend):
    cluster.run("scontrol", "update", "nodename=r0n2", "state=drain", "reason=fan is broken")
    condition = (await backend.conditions())["r0n2"]
    assert condition.state == "draining"
    assert "fan is broken" in condition.reason
    await backend.request(grant("wait-0", "r0n1", "r0n2"))
    status = await until(backend, "wait-0", lambda status: "None" not in status.reason and ":" in status.reason)
    assert status.state == "waiting"
    assert "r0n2" in status.reason
    cluster.run("scontrol", "update", "nodename=r0n2", "state=undrain")
    assert (await until(backend, "wait-0", lambda status: status.state == "granted")).lost_nodes == ()
    assert (await backend.conditions())["r0n2"].state == "up"


async def test_two_grants_share_a_node_but_no_gpu_and_shapes_may_differ(cluster, doomed, backend):
    first = grant("half-0", "r0n0", "r0n1")
    mixed = Grant("mixed", 0, "t", (*grant("x-0", "r0n0", "r0n1").shares, *grant("x-0", "r1n0", gpus=0).shares))
    await granted(backend, first)
    status = await granted(backend, mixed)
    assert status.lost_nodes == ()
    one, other = await notes(cluster, first), await notes(cluster, mixed)
    assert other["r1n0"] == f"r1n0 mixed-0 [] {SECRET}"
    for node in ("r0n0", "r0n1"):
        devices = [text.partition("[")[2].partition("]")[0].split(",") for text in (one[node], other[node])]
        assert sorted(devices[0] + devices[1]) == ["0", "1", "2", "3"], devices


async def test_a_secret_is_in_the_environment_only(cluster, backend):
    wanted = grant("secret-0", "r0n0")
    await granted(backend, wanted)
    assert SECRET in (await notes(cluster, wanted))["r0n0"]
    shown = cluster.run("scontrol", "show", "job", "-d") + cluster.run(
        "scontrol", "write", "batch_script", job_id(cluster, "secret-0"), "-"
    )
    assert "reflux-secret-0" in shown
    for text in (shown, *processes("secret-0").values()):
        assert SECRET not in text


def job_id(cluster: SlurmCluster, grant_id: str) -> str:
    return cluster.run("squeue", "-h", "-n", f"reflux-{grant_id}", "-o", "%A").split()[0]


async def test_a_grant_asked_twice_is_one_job_and_a_late_second_one_never_runs(cluster, backend):
    wanted = grant("twice-0", "r0n0", "r1n0")
    async with backend_of(cluster) as other:
        await asyncio.gather(backend.request(wanted), backend.request(wanted))
        await other.request(wanted)
        # An sbatch of a scheduler that was killed arrives after the look-up of its successor.
        late = grant("twice-0", "r0n3", "r1n1")
        await other._client.submit(await other._order(late))
        await notes(cluster, wanted)
        assert len(cluster.run("squeue", "-h", "-n", "reflux-twice-0", "-t", "PD,R,CF", "-o", "%A").split()) == 2
        await until(backend, "twice-0", lambda status: status.state == "granted")
    states = cluster.run("squeue", "-h", "-n", "reflux-twice-0", "-t", "all", "-o", "%A %T").splitlines()
    assert sorted(line.split()[1] for line in states) == ["CANCELLED", "RUNNING"]
    assert agents_of(cluster, "twice-0") == {"r0n0", "r1n0"}


async def test_a_released_grant_leaves_no_process_and_never_comes_back(cluster, backend):
    wanted = grant("free-0", "r0n0", "r0n1", gpus=4)
    await granted(backend, wanted)
    await notes(cluster, wanted)
    assert processes("free-0")
    await backend.release("free-0")
    await backend.release("free-0")
    await backend.release("never-was-0")
    await until(backend, "free-0", lambda status: status.state == "ended")
    assert not processes("free-0")
    await backend.request(wanted)
    async with backend_of(cluster) as successor:
        await successor.request(wanted)
        assert (await until(successor, "free-0", lambda status: status.state == "ended")).reason
    await granted(backend, grant("free-1", "r0n0", "r0n1", gpus=4))
    assert not processes("free-0")


async def test_a_job_cancelled_by_an_operator_has_ended_with_its_cause(cluster, backend):
    wanted = grant("operator-0", "r0n0", "r0n1")
    await granted(backend, wanted)
    cluster.run("scancel", job_id(cluster, "operator-0"))
    await until(backend, "operator-0", lambda status: status.state == "ended" and "cancelled" in status.reason)
    await gone("operator-0")


async def test_jobs_of_others_take_their_nodes_out_of_the_room(cluster, backend):
    await granted(backend, grant("ours-0", "r0n0"))
    foreign = (
        "--parsable",
        "--job-name=theirs",
        "--mem=100",
        "--cpus-per-task=3",
        "--gres=gpu:1",
        "--output=/dev/null",
    )
    ids = [
        cluster.run("sbatch", *foreign, f"--nodelist={node}", "--wrap=sleep 600").strip() for node in ("r0n0", "r0n1")
    ]
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while cluster.run("squeue", "-h", "-n", "theirs", "-o", "%T").split() != ["RUNNING", "RUNNING"]:
                await asyncio.sleep(0.05)
        seen = await backend.conditions()
        async with backend_of(cluster, foreign_jobs="share") as sharing:
            shared = await sharing.conditions()
        assert "theirs" not in await backend.grants()
    finally:
        cluster.run("scancel", *ids)
    theirs = Resources(1, 3000, 100 * MIB)
    assert (seen["r0n1"].state, seen["r0n1"].foreign) == ("draining", theirs)
    assert "1 of 4 GPUs" in seen["r0n1"].reason
    assert (seen["r0n0"].state, seen["r0n0"].foreign) == ("up", theirs)
    assert (shared["r0n1"].state, shared["r0n1"].foreign) == ("up", theirs)
    assert (seen["r0n3"].state, seen["r0n3"].foreign) == ("up", NOTHING)


@pytest.mark.slow
async def test_nodes_can_be_pinned_by_excluding_the_others(cluster, backend):
    async with backend_of(cluster, pin="exclude", switches=True) as excluding:
        wanted = grant("pinned-0", "r0n1", "r1n1")
        await granted(excluding, wanted)
        await notes(cluster, wanted)
    assert agents_of(cluster, "pinned-0") == {"r0n1", "r1n1"}


async def test_room_that_no_node_has_is_refused(backend):
    with pytest.raises(GrantRefused, match="configuration is not available"):
        await backend.request(grant("big-0", "r0n0", gpus=9))
    with pytest.raises(GrantRefused, match="node"):
        await backend.request(grant("nowhere-0", "x0n0"))


async def test_slurmrestd_serves_as_well_as_the_commands(cluster, backend):
    rest = {"rest_url": cluster.rest_url, "topology_file": f"{cluster.folder}/topology.conf"}
    async with backend_of(cluster, rest_token=cluster.token(), **rest) as over_rest:
        assert [node.name for node in (await over_rest.discover()).nodes] == cluster.nodes
        wanted = Grant("rest", 0, "t", (*grant("x-0", "r0n1", "r0n3").shares, *grant("x-0", "r1n0", gpus=1).shares))
        status = await granted(over_rest, wanted)
        assert (await notes(cluster, wanted))["r1n0"] == f"r1n0 rest-0 [0] {SECRET}"
        assert status == (await backend.grants())["rest-0"]
        ours = await over_rest.conditions()
        assert {node: (c.state, c.foreign) for node, c in ours.items() if node != "r1n3"} == {
            node: (c.state, c.foreign) for node, c in (await backend.conditions()).items() if node != "r1n3"
        }
        await over_rest.release("rest-0")
        await gone("rest-0")
        with pytest.raises(GrantRefused):
            await over_rest.request(grant("rest-1", "r0n0", gpus=9))
    async with backend_of(cluster, rest_token="wrong", **rest) as stranger:
        with pytest.raises(BackendAway, match="as root"):
            await stranger.grants()


@pytest.mark.slow
async def test_a_step_whose_stepd_is_killed_leaves_no_process(cluster, backend):
    wanted = grant("stepd-0", "r0n0", "r0n1")
    await granted(backend, wanted)
    await notes(cluster, wanted)
    launchers = [pid for pid, line in processes("stepd-0").items() if "launcher" in line and "srun" not in line]
    assert len(launchers) == 2
    stepds = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in launchers}
    for pid in stepds:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_SECONDS):
        while any(pid in processes("stepd-0") for pid in launchers):
            await asyncio.sleep(0.05)
    await backend.release("stepd-0")
    await gone("stepd-0")


async def test_a_node_whose_slurmd_was_killed_is_reported_lost(cluster, doomed, backend):
    status = await until(backend, DOOMED, lambda status: bool(status.lost_nodes))
    assert (status.state, status.lost_nodes) == ("granted", ("r1n3",))
    condition = (await backend.conditions())["r1n3"]
    assert condition.state == "down"
    # The other node's agent goes on: sh -c of r1n2 still sleeps.
    assert any("sleep 600" in line and "launcher" not in line for line in processes(DOOMED).values())


@pytest.mark.slow
async def test_a_controller_that_is_away_is_said_soon_and_grants_outlive_it(cluster, backend):
    wanted = grant("outlive-0", "r0n0", "r0n1")
    await granted(backend, wanted)
    await notes(cluster, wanted)
    agents = set(processes("outlive-0"))
    cluster.kill("slurmctld", signal.SIGTERM)
    async with backend_of(cluster, call_seconds=1.0) as hasty:
        calls = (hasty.grants(), hasty.conditions(), hasty.release("outlive-0"), hasty.request(grant("new-0", "r0n2")))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [BackendAway] * 4, answers
    cluster.start("slurmctld")
    async with backend_of(cluster) as successor:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                with contextlib.suppress(BackendAway):
                    status = (await successor.grants())["outlive-0"]
                    break
        assert (status.state, status.lost_nodes) == ("granted", ())
        assert set(processes("outlive-0")) == agents


@pytest.mark.slow
async def test_a_part_outlives_the_node_that_its_batch_script_ran_on(cluster, backend):
    wanted = grant("batch-0", "r1n0", "r1n1")
    await granted(backend, wanted)
    await notes(cluster, wanted)
    cluster.kill("r1n0")
    status = await until(backend, "batch-0", lambda status: bool(status.lost_nodes))
    assert (status.state, status.lost_nodes) == ("granted", ("r1n0",))
    cluster.start("r1n0")
    # Slurm itself ends what is left on the node when its slurmd is back; the other one goes on.
    async with asyncio.timeout(HANG_SECONDS):
        while sum("sleep 600" in line and "launcher" not in line for line in processes("batch-0").values()) != 1:
            await asyncio.sleep(0.05)
    await backend.release("batch-0")
    await gone("batch-0")


@pytest.mark.slow
def test_a_killed_test_leaves_no_daemon(tmp_path):
    program = (
        "import slurm_cluster as s; m = s.slurm_cluster(); c = m.__enter__(); print(c.folder, flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    folder = process.stdout.readline().strip()
    assert daemons(folder)
    process.kill()
    process.wait()
    end = time.monotonic() + HANG_SECONDS
    while daemons(folder):
        assert time.monotonic() < end
        time.sleep(0.05)
    shutil.rmtree(folder)


def daemons(folder: str) -> list[str]:
    """Names of processes that have a cluster's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and folder.encode() in (entry / "cmdline").read_bytes():
                found.append((entry / "comm").read_text().strip())
    return found
