"""A cluster that gives room as a test says, and candidates for its scheduler; nothing runs."""

import asyncio
from collections.abc import Callable, Mapping

from redis.asyncio import Redis
from scheduler_stack import HANG_SECONDS

from reflux_placement.policy.health import DEFAULT_DAMPING
from reflux_placement.policy.spares import SpareRule
from reflux_placement.policy.view import DEFAULT_QUEUE, Queue
from reflux_placement.topology import Node, Resources, Topology, build_topology
from reflux_scheduler.backends.base import Backend, Grant, GrantStatus, NodeCondition
from reflux_scheduler.candidate import Candidate, Plan
from reflux_scheduler.fleet import Terms
from reflux_scheduler.main import SchedulerSettings
from reflux_scheduler.planner import Rules
from reflux_scheduler.spec import JobSpec, RoleTemplate

SPEC = JobSpec("test", (RoleTemplate("learner", 1, Resources(gpus=4), ("x",)),))
WHOLE_NODE = Resources(gpus=4)


class FakeCluster(Backend):
    """Gives all room at once, except on nodes that are `busy` for somebody else. No agent ever comes."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes
        self.busy: frozenset[str] = frozenset()
        self.given: dict[str, GrantStatus] = {}
        self.asked: list[Grant] = []
        self.released: list[str] = []

    async def discover(self) -> Topology:
        return build_topology("c", [Node(name, Resources(4, 4000, 1 << 30), {"rack": "r"}) for name in self.nodes])

    async def conditions(self) -> Mapping[str, NodeCondition]:
        # The others are seen once they are in our way, as on a cluster whose lists lag.
        seen = self.busy if self.asked else ()
        return {n: NodeCondition("up", foreign=WHOLE_NODE if n in seen else Resources()) for n in self.nodes}

    async def request(self, grant: Grant) -> None:
        self.asked.append(grant)
        waits = any(share.node in self.busy for share in grant.shares)
        state = ("waiting", "somebody else is there") if waits else ("granted", "")
        self.given[grant.id] = GrantStatus(grant.id, state[0], reason=state[1])

    async def release(self, grant_id: str) -> None:
        self.released.append(grant_id)
        self.given.pop(grant_id, None)

    async def grants(self) -> Mapping[str, GrantStatus]:
        return dict(self.given)


async def candidate(
    keys: Redis, cluster: FakeCluster, leader_seconds: float, *, start_seconds: float = 600, grant_seconds: float = 600
) -> Candidate:
    plan = Plan(
        topology=await cluster.discover(),
        spares=SpareRule(),
        rules=Rules(
            queues={DEFAULT_QUEUE: Queue(name=DEFAULT_QUEUE)}, grant_seconds=grant_seconds, shared_agents=False
        ),
        terms=Terms(),
        flaps=DEFAULT_DAMPING,
        start_seconds=start_seconds,
        poll_seconds=0.02,
        leader_seconds=leader_seconds,
        backend_name="kubernetes",
    )
    return Candidate(keys, plan, cluster, SchedulerSettings(listen="127.0.0.1:0"))


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that no message tells."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
