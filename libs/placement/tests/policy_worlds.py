"""A cluster that carries out what the policy decides, for the tests of the policy: time stands still unless told."""

from collections.abc import Mapping, Sequence

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import DEFAULT_CONFIG, decide
from reflux_placement.policy.view import (
    Ask,
    Claim,
    Decision,
    Live,
    Migrate,
    NodeState,
    Preempt,
    Queue,
    Replace,
    Requeue,
    Resize,
    Start,
    View,
)
from reflux_placement.room import Room
from reflux_placement.topology import Node, Resources, Topology, build_topology


def racks(sizes: Sequence[int], gpus: int = 4) -> Topology:
    """sizes[r] nodes in rack r, two racks a block."""
    nodes = [
        Node(f"r{rack}n{node}", Resources(gpus, 64_000, 1 << 40), {"rack": f"r{rack}", "block": f"b{rack // 2}"})
        for rack, size in enumerate(sizes)
        for node in range(size)
    ]
    return build_topology("gb", nodes)


def workers(count: int, gpus: int = 4, *, gang_level: str = "cluster", **more: object) -> GangDemand:
    """A gang of one role."""
    each = Resources(gpus, 1000, 1 << 30)
    role = RoleDemand(role="work", count=count, each=each, **more)  # pyright: ignore[reportArgumentType]
    return GangDemand(roles=(role,), required_level=gang_level)


class Yard:
    """Jobs that the policy stops go on holding their room until `stopped`, as real ones do."""

    def __init__(self, topology: Topology, queues: Sequence[Queue] = (), config: PolicyConfig = DEFAULT_CONFIG) -> None:
        self.room, self.config = Room(topology), config
        self.queues: Mapping[str, Queue] = {queue.name: queue for queue in queues}
        self.pending: dict[str, Ask] = {}
        self.live: dict[str, Live] = {}
        self.stopping: set[str] = set()
        self.nodes: dict[int, NodeState] = {}
        self.spares: frozenset[int] = frozenset()
        self.claims: tuple[Claim, ...] = ()
        self.now = 0.0
        self.number = 0

    def submit(self, job: str, gang: GangDemand, **more: object) -> Ask:
        """A pending job; numbers count up."""
        self.number += 1
        ask = Ask(job=job, number=self.number, gang=gang, submitted_at=self.now, **more)  # pyright: ignore[reportArgumentType]
        self.pending[job] = ask
        return ask

    def cycle(self) -> Decision:
        """Decides and carries out."""
        room = self.room.copy()
        room.open_N[[*self.nodes, *self.spares]] = False
        view = View(
            room=room,
            pending=list(self.pending.values()),
            live={job: live for job, live in self.live.items() if job not in self.stopping},
            queues=self.queues,
            nodes=self.nodes,
            spares=self.spares,
            claims=self.claims,
            now=self.now,
        )
        decision = decide(view, self.config)
        self.claims = decision.claims
        for action in decision.actions:
            match action:
                case Start():
                    ask = self.pending.pop(action.job)
                    self.room.take(action.job, ask.gang, action.assignment)
                    self.live[action.job] = Live(ask=ask, started_at=self.now, saved_at=self.now)
                case Preempt():
                    self.stopping.update(action.victims)
                case Requeue():
                    self.stopping.add(action.job)
                case Resize() | Replace():
                    demand = self.room.holdings[action.job].demand
                    self.room.release(action.job)
                    self.room.take(action.job, demand, action.assignment)
                case Migrate():
                    demands = {job: self.room.holdings[job].demand for job, _ in action.moves}
                    self.room.release_all(demands)
                    for job, assignment in action.moves:
                        self.room.take(job, demands[job], assignment)
        return decision

    def end(self, *jobs: str) -> None:
        """Jobs that are over."""
        for job in jobs:
            self.room.release(job)
            del self.live[job]

    def stopped(self) -> None:
        """All that were told to stop have stopped and wait again."""
        for job in sorted(self.stopping):
            self.pending[job] = self.live[job].ask
            self.end(job)
        self.stopping.clear()

    def running(self) -> set[str]:
        """Jobs that hold room and were not told to stop."""
        return set(self.live) - self.stopping


def started(decision: Decision) -> list[str]:
    """Jobs that start, in order."""
    return [action.job for action in decision.actions if isinstance(action, Start)]


def preempted(decision: Decision) -> set[str]:
    """All victims."""
    return {job for action in decision.actions if isinstance(action, Preempt) for job in action.victims}
