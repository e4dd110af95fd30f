"""A whole scheduler without processes, sockets and Redis: its members are entries in a table of who uses which GPUs."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from fake_cluster import FakeCluster

from reflux_kit.settings import ServiceSettings
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.spares import SpareRule
from reflux_placement.policy.view import DEFAULT_QUEUE, Queue
from reflux_placement.room import gpu_indices
from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import Backend, Grant, GrantRefused, GrantStatus, NodeCondition
from reflux_scheduler.book import Book
from reflux_scheduler.controller import Controller
from reflux_scheduler.crew import AgentAway, Crew
from reflux_scheduler.fleet import Fleet, Post, Terms
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Heard, Job, Report, Seat
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.nodes import Nodes
from reflux_scheduler.planner import Rules
from reflux_scheduler.store import Store

FOR_EVER = 1e9


class MemoryStore(Store):
    """Jobs in a dict; a second book on it is the scheduler after a restart."""

    def __init__(self) -> None:
        self.saved: dict[str, Job] = {}
        self.requests: dict[str, str] = {}
        self.claimed = "[]"

    async def confirm(self) -> None:
        return

    async def create(self, job, request_id):
        if request_id not in self.requests:
            self.requests[request_id] = job.id
            self.saved[job.id] = job
        return self.requests[request_id]

    async def save(self, changes):
        self.saved |= {after.id: after for _, after in changes}

    async def load(self):
        return sorted(self.saved.values(), key=lambda job: job.number), []

    async def forget(self, job_id):
        del self.saved[job_id]

    async def drains(self):
        return {}

    async def set_drain(self, node, why):
        return

    async def health(self):
        return {}

    async def set_health(self, health):
        return

    async def claims(self):
        return self.claimed

    async def set_claims(self, text):
        self.claimed = text


def a_book(store: Store, ledger: Ledger) -> Book:
    """A book that tells nobody of changes."""
    return Book(store, ledger, Metrics(ledger.topology.levels), lambda before, after: None)


class Machines(Crew):
    """Agents as a table of processes. A member that is told to stop stays until `leave` says so, or at once."""

    def __init__(self, fleet: Fleet, topology: Topology) -> None:
        super().__init__(fleet, topology, ServiceSettings(listen="127.0.0.1:0"))
        self._fleet = fleet
        self.dead: set[str] = set()
        self.slow = False
        self.told: list[str] = []
        self.running: dict[tuple[Post, str], tuple[frozenset[int], int]] = {}
        """By agent and member: its GPUs and its attempt."""

        self.leaving: dict[tuple[Post, str], asyncio.Event] = {}
        self.faults: list[str] = []
        self._incarnations: dict[Post, str] = {}
        self._revision = 0

    def up(self, post: Post) -> None:
        """The agent of a post comes: as a new incarnation after it was lost."""
        self.dead.discard(post[0])
        self._revision += 1
        reports = [
            Report(label, "running", pid=self._revision, revision=self._revision, attempt=attempt)
            for (where, label), (_, attempt) in self.running.items()
            if where == post
        ]
        incarnation = self._incarnations.setdefault(post, f"i{self._revision}")
        self._fleet.register(post, "127.0.0.1:9", incarnation, reports, time.monotonic())

    def take_over(self, before: "Machines") -> None:
        """After a restart of the scheduler: the agents and their members are those of before."""
        self.dead, self.running = before.dead, before.running
        self._revision, self._incarnations = before._revision, before._incarnations

    def lose(self, post: Post) -> None:
        """A node dies with all that runs there."""
        self.dead.add(post[0])
        self._incarnations.pop(post, None)
        self._fleet.agents()[post].heard_at = float("-inf")
        for key in [key for key in self.running if key[0] == post]:
            self._gone(key)

    def leave(self, key: tuple[Post, str]) -> None:
        """A member that was told to stop is gone."""
        self._gone(key)

    def _gone(self, key: tuple[Post, str]) -> None:
        self.running.pop(key, None)
        if key in self.leaving:
            self.leaving.pop(key).set()

    async def start(self, job: Job, seat: Seat) -> Heard:
        post, label = (seat.node, job.grant_id(seat.part)), f"{job.id}/{seat.label}"
        await asyncio.sleep(0)
        incarnation = self._incarnation(post)
        gpus = frozenset(gpu_indices(seat.gpus))
        if (post, label) not in self.running:
            for (other_post, other), (used, _) in self.running.items():
                if other_post[0] == seat.node and used & gpus:
                    self.faults.append(f"{label} starts on {seat.node} where {other} runs")
                if other == label:
                    self.faults.append(f"{label} starts on {seat.node} and runs on {other_post[0]}")
            self.running[post, label] = (gpus, job.attempt)
        return self._heard(incarnation, label, "running", job.attempt)

    async def stop(self, job: Job, seat: Seat, *, wait: bool = True) -> Heard | None:
        post, label = (seat.node, job.grant_id(seat.part)), f"{job.id}/{seat.label}"
        await asyncio.sleep(0)
        self.told.append(label if wait else f"no wait {label}")
        incarnation = self._incarnation(post)
        if (post, label) not in self.running:
            return None
        _, attempt = self.running[post, label]
        gone = self.leaving.setdefault((post, label), asyncio.Event())
        if not wait:
            return self._heard(incarnation, label, "running", attempt)
        if not self.slow:
            self._gone((post, label))
        await gone.wait()
        if self._incarnation(post) != incarnation:
            raise AgentAway(f"node {post[0]} was lost")
        return self._heard(incarnation, label, "stopped", attempt)

    async def forget(self, post: Post) -> None:
        for key in [key for key in self.running if key[0] == post]:
            self._gone(key)

    def _incarnation(self, post: Post) -> str:
        agent = self._fleet.agent(post)
        if agent is None or post[0] in self.dead:
            raise AgentAway(f"node {post[0]} does not answer")
        return agent.incarnation

    def _heard(self, incarnation: str, label: str, state, attempt: int) -> Heard:
        self._revision += 1
        report = Report(label, state, pid=self._revision, revision=self._revision, attempt=attempt)
        return Heard(incarnation, {label: report})


class InMemory:
    """One reign. `events` of a test go to `controller` and `machines`."""

    def __init__(self, topology: Topology, backend: Backend, store: Store, **seconds: float) -> None:
        self.topology, self.backend, self.store = topology, backend, store
        self.fleet = Fleet(Terms(lease_seconds=FOR_EVER, heartbeat_seconds=FOR_EVER), time.monotonic())
        self.machines = Machines(self.fleet, topology)
        self.ledger = Ledger(topology)
        rules = Rules(
            queues={DEFAULT_QUEUE: Queue(name=DEFAULT_QUEUE)},
            config=PolicyConfig(locality_patience_seconds=0.0, defragmentation_seconds=0.0),
            grant_seconds=seconds.get("grant_seconds", 600.0),
            shared_agents=backend.shared_agents,
        )
        self.grants = Grants(backend, 0.02, lambda ids: self.controller.heard_grants(ids), store.confirm)
        self.controller = Controller(
            store,
            self.ledger,
            Nodes(topology, SpareRule()),
            self.fleet,
            self.machines,
            self.grants,
            rules,
            Metrics(topology.levels),
            seconds.get("start_seconds", 600.0),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["InMemory"]:
        await self.controller.load()
        task = asyncio.create_task(self.controller.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def jobs(self) -> Mapping[str, Job]:
        return self.controller.book.jobs

    def forget_absent_agents(self) -> None:
        """The time is over in which a new scheduler waits for the agents of before. Here no heartbeat ends it: agents
        of nodes that died, and of grants that were given back, would be waited for without end."""
        self.controller._began = float("-inf")
        self.controller.wake()


class Exact(FakeCluster):
    """A cluster that gives no GPU twice: a grant waits for others to be given back. Its agents come with it."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(*nodes)
        self.world: InMemory
        self.shares: dict[str, dict[str, frozenset[int]]] = {}
        self.refuses = False

    async def conditions(self) -> Mapping[str, NodeCondition]:
        return {node: NodeCondition("down" if node in self.world.machines.dead else "up") for node in self.nodes}

    async def request(self, grant: Grant) -> None:
        if self.refuses and grant.part > 0:
            raise GrantRefused("not now")
        self.shares[grant.id] = {share.node: frozenset(share.gpu_indices) for share in grant.shares}
        self.given.setdefault(grant.id, GrantStatus(grant.id, "waiting", reason="busy"))

    async def release(self, grant_id: str) -> None:
        for node in self.shares.pop(grant_id, ()):
            await self.world.machines.forget((node, grant_id))
        self.given.pop(grant_id, None)

    async def grants(self) -> Mapping[str, GrantStatus]:
        machines = self.world.machines
        for grant_id, status in list(self.given.items()):
            if status.state == "waiting" and not self._taken(grant_id):
                lost = tuple(sorted(self.shares[grant_id].keys() & machines.dead))
                self.given[grant_id] = GrantStatus(grant_id, "granted", lost_nodes=lost)
                for node in lost:
                    del self.shares[grant_id][node]
                for node in self.shares[grant_id]:
                    machines.up((node, grant_id))
                    self.world.controller.registered((node, grant_id))
        return dict(self.given)

    def lose(self, node: str) -> None:
        for grant_id, status in self.given.items():
            if status.state == "granted" and node in self.shares[grant_id]:
                self.shares[grant_id].pop(node)
                self.given[grant_id] = replace(status, lost_nodes=(*status.lost_nodes, node))
                if self.world.fleet.agent((node, grant_id)) is not None:
                    self.world.machines.lose((node, grant_id))
        self.world.machines.dead.add(node)

    def _taken(self, grant_id: str) -> bool:
        wanted = self.shares[grant_id]
        others = [self.shares[other] for other, status in self.given.items() if status.state == "granted"]
        return any(wanted[node] & other.get(node, frozenset()) for other in others for node in wanted)
