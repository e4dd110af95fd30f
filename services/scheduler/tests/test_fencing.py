"""What a deposed leader does to the cluster: it releases nothing and asks for nothing any more."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import redis
from redis.asyncio import Redis
from scheduler_stack import HANG_SECONDS

from reflux_placement.policy.health import DEFAULT_DAMPING
from reflux_placement.policy.spares import SpareRule
from reflux_placement.policy.view import DEFAULT_QUEUE, Queue
from reflux_placement.topology import Node, Resources, Topology, build_topology
from reflux_scheduler.backends.base import Backend, Grant, GrantStatus, NodeCondition
from reflux_scheduler.candidate import Candidate, Plan
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.fleet import Terms
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job, JobSpec, Placement, RolePlaces, RoleTemplate
from reflux_scheduler.main import SchedulerSettings
from reflux_scheduler.planner import Rules
from reflux_scheduler.store import LEADER, Store

SPEC = JobSpec("test", (RoleTemplate("learner", 1, Resources(gpus=1), ("x",)),))


class Cluster(Backend):
    """A cluster of one node that gives all room at once."""

    def __init__(self) -> None:
        self.given: dict[str, GrantStatus] = {}
        self.released: list[str] = []

    async def discover(self) -> Topology | None:
        return build_topology("c", [Node("n1", Resources(4, 4000, 1 << 30), {"rack": "r"})])

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return {"n1": NodeCondition("up")}

    async def request(self, grant: Grant) -> None:
        self.given[grant.id] = GrantStatus(grant.id, "granted")

    async def release(self, grant_id: str) -> None:
        self.released.append(grant_id)
        self.given.pop(grant_id, None)

    async def grants(self) -> Mapping[str, GrantStatus]:
        return dict(self.given)


@pytest.fixture
async def keys(valkey):
    url = f"{valkey}/5"
    with redis.Redis.from_url(url) as connection:
        connection.flushdb()
    async with Redis.from_url(url) as connection:
        yield connection


async def candidate(keys: Redis, cluster: Cluster, leader_seconds: float) -> Candidate:
    topology = await cluster.discover()
    assert topology is not None
    plan = Plan(
        topology=topology,
        spares=SpareRule(),
        rules=Rules(queues={DEFAULT_QUEUE: Queue(name=DEFAULT_QUEUE)}, shared_agents=False),
        terms=Terms(),
        flaps=DEFAULT_DAMPING,
        start_seconds=600,
        poll_seconds=0.02,
        leader_seconds=leader_seconds,
        backend_name="kubernetes",
    )
    return Candidate(keys, plan, cluster, SchedulerSettings(listen="127.0.0.1:0"))


async def until(condition) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_deposed_leader_does_not_release_the_grants_of_the_next_one(keys):
    cluster = Cluster()
    # The first renews its lease once in 200 s: what happens until then it does not hear, like one behind a partition.
    first, second = await candidate(keys, cluster, 600), await candidate(keys, cluster, 0.3)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(first.standing("a:1", "a"))
        await first.leading()
        await keys.delete(LEADER)
        await stack.enter_async_context(second.standing("b:1", "b"))
        controller = await second.leading()
        job = await controller.create(SPEC, "one")
        await until(lambda: cluster.given or cluster.released)
        await until(lambda: not first.term or cluster.released)
        assert cluster.released == []
        assert list(cluster.given) == [f"{job.id}-0"]
        assert second.term


async def test_a_leader_gives_back_what_belongs_to_no_job(keys):
    cluster = Cluster()
    cluster.given["stray-0"] = GrantStatus("stray-0", "granted")
    leader = await candidate(keys, cluster, 600)
    async with leader.standing("a:1", "a"):
        await until(lambda: cluster.released)
        assert cluster.released == ["stray-0"]
        assert leader.term


async def test_a_deposed_leader_asks_for_nothing_and_gives_nothing_back(keys):
    cluster, store = Cluster(), Store(keys)
    store.lease = "1 a:1 a"
    await keys.set(LEADER, "2 b:1 b")
    grants = Grants(cluster, 600, lambda _: None, store.confirm)
    places = Placement("node", "c/r/n1", (RolePlaces("learner", ("n1",), (1,), (0,)),))
    with pytest.raises(NotLeading):
        await grants.request(replace(Job("j", 1, SPEC, 0.0), placement=places), 0)
    assert cluster.given == {}
    cluster.given["k-0"] = GrantStatus("k-0", "granted")
    with pytest.raises(NotLeading):
        await grants.look(frozenset)
    assert cluster.released == []
