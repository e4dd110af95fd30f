"""The Ray backend on a real Ray cluster: a head and two racks of two nodes, each with a raylet of its own."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray_cluster

from reflux_placement.topology import NOTHING, Resources
from reflux_scheduler.backends.base import (
    AgentLaunch,
    BackendAway,
    Grant,
    GrantRefused,
    GrantStatus,
    NodeCondition,
    NodeShare,
)
from reflux_scheduler.backends.ray.backend import RayBackend
from reflux_scheduler.backends.ray.settings import RaySettings

HANG_SECONDS = 60
WHOLE_NODE = Resources(4, 4000, 1 << 30)
SECRET = "a-secret-of-the-stack"
# A stand-in for reflux-agent: it tells where it is and has a child as the agent has keepers, in a session of its own,
# deaf to SIGTERM, gone when their common pipe closes.
AGENT = """
import json, os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal, sys; signal.signal(15, signal.SIG_IGN); "
    "sys.stdin.read()"], start_new_session=True, stdin=subprocess.PIPE)
out = pathlib.Path(os.environ["OUT"], os.environ["REFLUX_AGENT_GRANT"] + "@" + os.environ["REFLUX_AGENT_NODE"])
told = {"pid": os.getpid(), "child": child.pid, "environment": dict(os.environ)}
out.with_suffix(".part").write_text(json.dumps(told))
out.with_suffix(".part").replace(out)
time.sleep(600)
"""


@pytest.fixture
def cluster(ray_nodes, monkeypatch):
    for name, value in ray_nodes.environment.items():
        monkeypatch.setenv(name, value)
    return ray_nodes


@dataclass
class World:
    """One scheduler's view of the cluster."""

    cluster: ray_cluster.RayCluster
    backend: RayBackend
    out: Path
    job: str

    def grant(self, *nodes: str, part: int = 0, room: Resources = WHOLE_NODE) -> Grant:
        return Grant(self.job, part, "test", tuple(NodeShare(node, room) for node in nodes), "ray/nvl")

    async def until(self, grant: Grant, condition: Callable[[GrantStatus], bool]) -> GrantStatus:
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                status = (await self.backend.grants()).get(grant.id)
                if status is not None and condition(status):
                    return status
                await asyncio.sleep(0.05)

    async def until_state(self, grant: Grant, state: str) -> GrantStatus:
        return await self.until(grant, lambda status: status.state == state)

    async def until_condition(self, node: str, condition: Callable[[NodeCondition], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition((await self.backend.conditions())[node]):
                await asyncio.sleep(0.05)

    async def agent(self, grant: Grant, node: str) -> dict:
        path = self.out / f"{grant.id}@{node}"
        async with asyncio.timeout(HANG_SECONDS):
            while not path.exists():
                await asyncio.sleep(0.02)
        return json.loads(path.read_text())


@asynccontextmanager
async def world(cluster, folder: Path, job: str, script: str = AGENT, namespace: str = "reflux"):
    environment = {"OUT": str(folder), "REFLUX_STACK_SECRET": SECRET, "REFLUX_STATE_DIR": str(folder / "state")}
    settings = RaySettings(address=cluster.address, namespace=namespace, stop_grace_seconds=1)
    async with RayBackend(settings, AgentLaunch(("python", "-c", script), environment)) as backend:
        yield World(cluster, backend, folder, job)
        for grant_id in await backend.grants():
            await backend.release(grant_id)


@pytest.fixture
async def ray_world(cluster, tmp_path, request):
    async with world(cluster, tmp_path, f"job{abs(hash(request.node.name)) % 10**8}") as ray_world:
        yield ray_world


def alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


async def gone(*pids: int) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


def command_lines_above(pid: int) -> list[str]:
    """Of a process and its ancestors, up to the raylet."""
    found: list[str] = []
    while pid > 1:
        found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        if "/raylet " in found[-1]:
            return found
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    raise AssertionError(f"no raylet above: {found}")


async def test_a_gang_runs_once_on_exactly_the_chosen_nodes_and_leaves_nothing(ray_world):
    topology = await ray_world.backend.discover()
    assert topology is not None
    assert [domain.label for domain in topology.domains("rack")] == ["ray/nvl-r0", "ray/nvl-r1"]
    assert [node.name for node in topology.nodes] == ["r0n0", "r0n1", "r1n0", "r1n1"]
    assert topology.nodes[0].resources == Resources(4, 4000, ray_cluster.MEMORY_BYTES)
    grant = ray_world.grant("r1n1", "r1n0")
    await ray_world.backend.request(grant)
    await ray_world.backend.request(grant)
    status = await ray_world.until_state(grant, "granted")
    assert status == GrantStatus(grant.id, "granted", f"ray placement group reflux-{grant.id}")
    agents = {node: await ray_world.agent(grant, node) for node in ("r1n0", "r1n1")}
    for node, agent in agents.items():
        lines = command_lines_above(agent["pid"])
        assert f"--node-name={node} " in lines[-1] + " "
        assert not any(SECRET in line for line in lines)
        assert agent["environment"]["REFLUX_STACK_SECRET"] == SECRET
        assert not [name for name in agent["environment"] if name.startswith("RAY_")]
        assert "CUDA_VISIBLE_DEVICES" not in agent["environment"]
    await ray_world.backend.request(grant)
    assert len(list(ray_world.out.glob("*@*"))) == 2
    await ray_world.backend.release(grant.id)
    await ray_world.backend.release(grant.id)
    assert not any(alive(agent["pid"]) or alive(agent["child"]) for agent in agents.values())
    await ray_world.backend.request(grant)
    assert await ray_world.backend.grants() == {}, "an id is never granted again"
    await ray_world.until_condition("r1n0", lambda node: node.foreign == NOTHING)


@pytest.mark.slow
async def test_room_that_others_hold_is_waited_for_with_rays_reason(ray_world, cluster, tmp_path):
    (tmp_path / "other").mkdir()
    async with world(cluster, tmp_path / "other", "theirs", namespace="other") as other:
        held = other.grant("r0n0", room=Resources(3, 1000))
        await other.backend.request(held)
        await other.until_state(held, "granted")
        await ray_world.until_condition("r0n0", lambda node: node.foreign == Resources(3, 1000))
        assert (await ray_world.backend.grants()) == {}, "grants of another namespace are not ours"
        grant = ray_world.grant("r0n0", room=Resources(2, 1000))
        await ray_world.backend.request(grant)
        waiting = await ray_world.until(grant, lambda status: "NO_RESOURCES" in status.reason)
        assert waiting.state == "waiting"
        assert "something that this scheduler did not place" in waiting.reason
        cancelled = ray_world.grant("r0n0", part=1)
        await ray_world.backend.request(cancelled)
        await ray_world.until(cancelled, lambda status: "NO_RESOURCES" in status.reason)
        await ray_world.backend.release(cancelled.id)
        assert not list(ray_world.out.glob("*@*")), "all or none: no agent before the whole group is there"
    await ray_world.until_state(grant, "granted")
    assert cancelled.id not in await ray_world.backend.grants()


async def test_room_that_the_cluster_never_has_is_refused(ray_world):
    with pytest.raises(GrantRefused, match="knows no node 'r7n7'; it knows head, r0n0, r0n1, r1n0, r1n1"):
        await ray_world.backend.request(ray_world.grant("r7n7"))
    with pytest.raises(GrantRefused, match="node r0n0 has less than is asked for: 5 GPUs of 4"):
        await ray_world.backend.request(ray_world.grant("r0n0", room=Resources(5)))
    assert await ray_world.backend.grants() == {}


@pytest.mark.slow
async def test_a_killed_driver_is_replaced_and_finds_everything_again(ray_world):
    grant, fresh = ray_world.grant("r0n0"), ray_world.grant("r1n0", part=1)
    await ray_world.backend.request(grant)
    await ray_world.until_state(grant, "granted")
    before = await ray_world.agent(grant, "r0n0")
    await ray_world.backend.request(fresh)
    os.kill(ray_world.backend.driver_pid, signal.SIGKILL)
    # The first call may still meet the dead one.
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            try:
                await ray_world.backend.request(fresh)
            except BackendAway:
                continue
            break
    await ray_world.until_state(fresh, "granted")
    assert (await ray_world.backend.grants())[grant.id] == GrantStatus(
        grant.id, "granted", f"ray placement group reflux-{grant.id}"
    )
    assert await ray_world.agent(grant, "r0n0") == before
    assert alive(before["pid"])
    await ray_world.agent(fresh, "r1n0")
    assert len(list(ray_world.out.glob("*@*"))) == 2
    # The successor stops agents that it did not start, and hears of their end.
    os.kill(before["pid"], signal.SIGKILL)
    lost = await ray_world.until(grant, lambda status: bool(status.lost_nodes))
    assert lost.reason == "r0n0: its agent ended with status -9"


@pytest.mark.slow
async def test_agents_that_do_not_stay_are_told_apart_from_those_that_cannot_start(cluster, tmp_path):
    async with world(cluster, tmp_path, "leaves", script="print('no more'); raise SystemExit(3)") as leaving:
        grant = leaving.grant("r0n0")
        await leaving.backend.request(grant)
        lost = await leaving.until(grant, lambda status: bool(status.lost_nodes))
        assert (lost.state, lost.lost_nodes) == ("granted", ("r0n0",))
        assert lost.reason == "r0n0: its agent ended with status 3; last output: no more"
        settings = RaySettings(address=cluster.address, stop_grace_seconds=1)
        launch = AgentLaunch(("no-such-agent",), {"REFLUX_STATE_DIR": str(tmp_path)})
    async with RayBackend(settings, launch) as backend:
        broken = World(cluster, backend, tmp_path, "broken")
        grant = broken.grant("r0n0", "r0n1")
        await backend.request(grant)
        ended = await broken.until_state(grant, "ended")
        assert "agents cannot be started: r0n0: no-such-agent" in ended.reason
        await backend.release(grant.id)
        assert await backend.grants() == {}


@pytest.mark.slow
async def test_a_rack_that_dies_node_by_node_is_left_for_the_other_one(ray_world):
    grant = ray_world.grant("r1n0", "r1n1")
    await ray_world.backend.request(grant)
    await ray_world.until_state(grant, "granted")
    agents = {node: await ray_world.agent(grant, node) for node in ("r1n0", "r1n1")}
    try:
        ray_world.cluster.kill("r1n0")
        status = await ray_world.until(grant, lambda status: bool(status.lost_nodes))
        assert (status.state, status.lost_nodes) == ("granted", ("r1n0",))
        await gone(agents["r1n0"]["pid"], agents["r1n0"]["child"])
        assert alive(agents["r1n1"]["pid"])
        await ray_world.until_condition("r1n0", lambda node: node.state == "down")
        dead = ray_world.grant("r1n0", part=1)
        await ray_world.backend.request(dead)
        ended = await ray_world.until_state(dead, "ended")
        assert ended.lost_nodes == ("r1n0",)
        ray_world.cluster.kill("r1n1")
        await ray_world.until(grant, lambda status: set(status.lost_nodes) == {"r1n0", "r1n1"})
        await gone(agents["r1n1"]["pid"], agents["r1n1"]["child"])
        await ray_world.backend.release(grant.id)
        elsewhere = ray_world.grant("r0n0", "r0n1", part=2)
        await ray_world.backend.request(elsewhere)
        await ray_world.until_state(elsewhere, "granted")
    finally:
        ray_world.cluster.add("r1n0", "r1n1")
    # The same names, other raylets: room there is given again.
    await ray_world.until_condition("r1n0", lambda node: node.state == "up")
    back = ray_world.grant("r1n0", part=3)
    await ray_world.backend.request(back)
    await ray_world.until_state(back, "granted")


async def test_a_cluster_that_is_not_there_is_away(cluster, tmp_path):
    settings = RaySettings(address="127.0.0.1:1", connect_seconds=0.3)
    async with RayBackend(settings, AgentLaunch(("true",), {"REFLUX_STACK_SECRET": SECRET})) as backend:
        with pytest.raises(BackendAway) as away:
            await backend.grants()
        assert SECRET not in str(away.value)
        assert backend.driver_pid == 0
