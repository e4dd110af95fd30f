"""The conformance suite on backend `slurm`: a real Slurm whose job steps are real agents.

Every agent is a new Python here, so that the tests with the most of them run in `make soak` only.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from conformance import suite
from conformance_world import World, nodes_of
from slurm_cluster import Layout, SlurmCluster, slurm_cluster, why_not

QUICK = ("test_the_life_of_a_gang",)
AGENT = b"reflux_scheduler.agent.main"
LAUNCHER = b"reflux_scheduler.backends.slurm.launcher"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


globals().update(suite(QUICK))


class SlurmWorld(World):
    """Racks of three and two nodes."""

    racks = (("r0n0", "r0n1", "r0n2"), ("r1n0", "r1n1"))
    cluster: SlurmCluster

    def settings(self) -> dict[str, str]:
        options = self.stack.folder / "slurm.toml"
        options.write_text(
            f'conf = "{self.cluster.conf}"\nwork_dir = "{self.cluster.folder}"\nagent_host = "loopback"\n'
            f'log_dir = "{self.stack.folder}"\n'
        )
        return {
            "REFLUX_SCHEDULER_BACKEND": "slurm",
            "REFLUX_SCHEDULER_BACKEND_OPTIONS": str(options),
            "REFLUX_STATE_DIR": str(self.stack.folder / "state"),
        }

    async def kill_node(self, node: str) -> None:
        self.cluster.kill(node)
        for pid, environment in self._processes(b""):
            if f"SLURMD_NODENAME={node}".encode() in environment:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def revive_node(self, node: str) -> None:
        self.cluster.start(node)

    async def occupy(self, node: str) -> None:
        size = (f"--nodelist={node}", "--exclusive", "--mem=0", f"--gres=gpu:{self.gpus}", "--output=/dev/null")
        self.cluster.run("sbatch", f"--job-name=on-{node}", *size, "--wrap=sleep 600")
        await self.until(lambda: self._state(node) == "RUNNING", "start of the foreign job")

    async def vacate(self, node: str) -> None:
        self.cluster.run("scancel", f"--name=on-{node}")

    def agents(self) -> list[int]:
        return [pid for pid, _ in self._processes(AGENT)]

    def _state(self, node: str) -> str:
        return self.cluster.run("squeue", "-h", "-n", f"on-{node}", "-o", "%T").strip()

    def _processes(self, program: bytes) -> list[tuple[int, list[bytes]]]:
        """Processes of job steps of this cluster with their environments; srun and launchers name the agent too."""
        found = []
        ours = f"SLURM_CONF={self.cluster.conf}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (entry / "cmdline").read_bytes()
                if program and (program not in words or LAUNCHER in words):
                    continue
                environment = (entry / "environ").read_bytes().split(b"\0")
                if ours in environment and any(each.startswith(b"SLURM_STEP_ID=") for each in environment):
                    found.append((int(entry.name), environment))
        return found


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster(Layout(racks=(3, 2), cpus=4, memory_mib=8192)) as cluster:
        yield cluster


@pytest.fixture
def world(own_stack, client, cluster):
    world = SlurmWorld(own_stack, client)
    world.cluster = cluster
    yield world
    own_stack.close()
    cluster.clear()


@pytest.mark.slow
async def test_members_of_two_jobs_on_one_node_see_gpus_of_their_own(world):
    """Slurm picks the devices of the second job; its members see those, not the indices that the scheduler counts."""
    world.scheduler()
    jobs = [await world.create(world.role("engine", 2, 1)), await world.create(world.role("reward", 2, 1))]
    seen: list[str] = []
    nodes: set[str] = set()
    for job in jobs:
        running = await world.client.until_state(job.name, "RUNNING")
        nodes |= set(nodes_of(running).values())
    await world.until(lambda: len(world.starts()) == 4, "every member's start")
    for member, (pid,) in world.starts().items():
        seen.append(world.environment_of(member, pid)["CUDA_VISIBLE_DEVICES"])
    assert len(nodes) == 1
    assert sorted(seen) == ["0", "1", "2", "3"]
    pids = [pid for starts in world.starts().values() for pid in starts]
    for job in jobs:
        await world.client.cancel(job.name)
        await world.client.until_state(job.name, "CANCELLED")
    await world.until_clean(*pids)
