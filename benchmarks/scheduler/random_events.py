"""Owns what may happen to a small cluster at random, and what really runs there: the world of `violations.py`."""

import random
from collections import Counter
from dataclasses import dataclass, field

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.search import fits_ever
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import Ask, Claim, Live, NodeState, Queue
from reflux_placement.room import Room
from reflux_placement.topology import Node, Resources, Topology, build_topology

SHAPES, MOST_PENDING = 40, 24
QUEUES = {
    queue.name: queue
    for queue in (
        Queue(name="research", weight=2.0, guaranteed=Resources(gpus=24), limit=Resources(gpus=56)),
        Queue(name="vision", parent="research", guaranteed=Resources(gpus=16)),
        Queue(name="chemistry", parent="research", weight=3.0, limit=Resources(gpus=40)),
        Queue(name="product", guaranteed=Resources(gpus=16), limit=Resources(gpus=48, millicpus=400_000)),
        Queue(name="free"),
    )
}
LEAVES = ("vision", "chemistry", "product", "free", "unlisted")


@dataclass(slots=True)
class Violations:
    """Counts by kind; `notes` has the first few in words."""

    starved: int = 0
    overcommitted: int = 0
    partial: int = 0
    quota: int = 0
    preempted: int = 0
    misplaced: int = 0
    lost: int = 0
    events: int = 0
    cycles: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.starved + self.overcommitted + self.partial + self.quota + self.preempted + self.misplaced + self.lost
        )

    def add(self, kind: str, note: str) -> None:
        """Counts one."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.notes) < 20:
            self.notes.append(f"{kind}: {note}")


def small_cluster() -> Topology:
    """2 blocks x 2 racks x 4 trays of 4 GPUs, and one tray that no rack claims: 68 GPUs."""
    nodes = [
        Node(f"n{rack}{tray}", Resources(4, 32_000, 256 << 30), {"rack": f"r{rack}", "block": f"b{rack // 2}"})
        for rack in range(4)
        for tray in range(4)
    ]
    return build_topology("small", [*nodes, Node("stray", Resources(4, 32_000, 256 << 30))])


def queues_above(queue: str) -> list[str]:
    """The queue and those above it."""
    path = [queue]
    while path[-1] in QUEUES and QUEUES[path[-1]].parent:
        path.append(QUEUES[path[-1]].parent)
    return path


class RandomEvents:
    """The state of the world and every way in which it changes by itself."""

    def __init__(self, seed: int, config: PolicyConfig) -> None:
        self.rng, self.config = random.Random(seed), config
        self.topology = small_cluster()
        self.room = Room(self.topology)
        self.pending: dict[str, Ask] = {}
        self.live: dict[str, Live] = {}
        self.nodes: dict[int, NodeState] = {}
        self.spares: frozenset[int] = frozenset()
        self.claims: tuple[Claim, ...] = ()
        self.stopping: set[str] = set()
        self.booked: dict[str, Claim] = {}
        """Claims of the actions that were carried out so far."""

        self.now, self.number = 0.0, 0
        self.found = Violations()
        self.feasible: dict[GangDemand, bool] = {}
        self.gangs = self.random_gangs()

    # --- events ---

    def event(self) -> None:
        """One of everything that may happen."""
        self.found.events += 1
        self.now += self.rng.expovariate(1 / 20.0)
        kinds = (self.submit, self.end, self.save, self.stop_one, self.break_node, self.mend_node, self.cancel)
        weights = (30, 26, 12, 16, 3, 6, 2)
        self.rng.choices(kinds, weights)[0]()

    def submit(self) -> None:
        """A job with a random gang, queue, priority and idea of how long it takes."""
        if len(self.pending) >= MOST_PENDING:
            return
        rng, self.number = self.rng, self.number + 1
        ask = Ask(
            job=f"j{self.number}", number=self.number, gang=rng.choice(self.gangs), submitted_at=self.now,
            queue=rng.choice(LEAVES), priority=rng.choice((0, 0, 0, 1, 5)), preemptible=rng.random() < 0.85,
            expected_seconds=rng.choice((0.0, 60.0, 300.0, 2000.0)), min_run_seconds=rng.choice((0.0, 0.0, 120.0)),
        )  # fmt: skip
        self.pending[ask.job] = ask

    def random_gangs(self) -> list[GangDemand]:
        """Shapes of the jobs to come; one in ten or so is larger than the cluster or a domain of it."""
        gangs: list[GangDemand] = []
        while len(gangs) < SHAPES:
            gang = self.random_gang()
            self.feasible[gang] = fits_ever(self.topology, gang) is None
            if self.feasible[gang] or self.rng.random() < 0.3:
                gangs.append(gang)
        return gangs

    def random_gang(self) -> GangDemand:
        """Any size, shape, elasticity and constraint; some have an idle second role."""
        rng = self.rng
        each = Resources(rng.choice((0, 1, 1, 2, 4, 4)), rng.choice((1000, 4000)), rng.choice((1, 16)) << 30)
        segment = rng.choice((0, 0, 0, 2, 4))
        count = rng.choice((1, 1, 2, 3, 4, 8, 12)) if not segment else segment * rng.choice((1, 2))
        unit = segment or 1
        least = count - unit * rng.randrange(count // unit) if rng.random() < 0.3 else count
        most = count + unit * rng.randrange(3) if rng.random() < 0.3 else count
        level = rng.choice(("cluster", "cluster", "block", "rack", "node"))
        role = RoleDemand(
            role="work", count=count, each=each, min_count=least, max_count=most, segment_size=segment,
            required_level=level if not (segment and level == "node") else "block",
        )  # fmt: skip
        extra = RoleDemand(role="idle", count=rng.choice((0, 1)), each=Resources(0, 1000))
        return GangDemand(roles=(role, extra) if rng.random() < 0.1 else (role,))

    def end(self) -> None:
        """A job ends, whatever it had said."""
        jobs = [job for job in self.live if job not in self.stopping]
        if jobs:
            self.gone(self.rng.choice(jobs))

    def gone(self, job: str) -> None:
        """A job holds nothing any more."""
        self.room.release(job)
        del self.live[job]
        self.stopping.discard(job)

    def save(self) -> None:
        """A job writes a checkpoint."""
        if self.live:
            job = self.rng.choice(list(self.live))
            old = self.live[job]
            self.live[job] = Live(ask=old.ask, started_at=old.started_at, saved_at=self.now, movable=True)

    def stop_one(self) -> None:
        """A job that was told to stop has stopped and waits again."""
        if self.stopping:
            job = self.rng.choice(sorted(self.stopping))
            self.pending[job] = self.live[job].ask
            self.gone(job)

    def break_node(self) -> None:
        """A node dies, drains or is damped."""
        if len(self.nodes) < 3:
            state: NodeState = self.rng.choice(("down", "draining", "flapping"))
            self.nodes[self.rng.randrange(self.topology.num_nodes)] = state

    def mend_node(self) -> None:
        """A node comes back."""
        if self.nodes:
            del self.nodes[self.rng.choice(sorted(self.nodes))]

    def cancel(self) -> None:
        """A pending job is withdrawn."""
        if self.pending:
            del self.pending[self.rng.choice(list(self.pending))]
