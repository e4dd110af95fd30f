"""Owns the values that a scheduling cycle reads (asks, live jobs, queues, node states) and writes (actions)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.room import Room
from reflux_placement.topology import NOTHING, Resources

DEFAULT_QUEUE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A tenant's share of the cluster. Queues form a tree; a child's use counts for its parents."""

    name: str
    parent: str = ""
    weight: float = 1.0
    """Share of what is contended, relative to its siblings."""

    guaranteed: Resources = NOTHING
    """What it gets back by preemption when others borrowed it; an amount of zero guarantees nothing."""

    limit: Resources | None = None
    """Most that it may hold, borrowed room included; None is no bound. Zero GPUs mean none at all, zero CPUs or bytes
    of memory mean no bound on them (so that a limit may name GPUs only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A job as the policy sees it. Times are seconds on the caller's clock."""

    job: str
    number: int
    """Order of submission; ties are broken by it."""

    gang: GangDemand
    submitted_at: float
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    """Higher goes first; a job preempts only jobs of lower priority, or borrowers of its queue's guarantee."""

    preemptible: bool = True
    expected_seconds: float = 0.0
    """How long it will run once started; 0 is unknown (never backfilled in front of a reservation)."""

    min_run_seconds: float = 0.0
    """It is not preempted before it has run for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A job that holds room. Its assignment is `room.holdings[job].assignment`."""

    ask: Ask
    started_at: float
    saved_at: float
    """Last checkpoint, or the start: work since then is lost when it is preempted."""

    movable: bool = False
    """A checkpoint is at hand, so that it may be migrated now."""

    smaller: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes that a role may shrink to for the sake of others, ascending, where room goes back in lots; a role that is
    not named shrinks to any size."""

    def shrinks_to(self, role: str, wanted: int, present: int, unit: int = 1) -> Sequence[int]:
        """Sizes of a role from its present one down to `wanted`, in steps of `unit` where any size will do."""
        if role not in self.smaller:
            return range(present, wanted - 1, -unit)
        return (present, *(size for size in reversed(self.smaller[role]) if wanted <= size < present))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Room that is kept for a pending job until it starts. A cycle returns its claims, the next one takes them in: so
    room that preemption frees stays with its beneficiary, after a restart of the scheduler too."""

    job: str
    assignment: Assignment
    after: tuple[str, ...]
    """Jobs that hold some of it now."""

    evicting: bool
    """Whether they were told to leave (preempted, shrunk, migrated); otherwise they are expected to end, and others may
    use the room up to `due_at`."""

    due_at: float
    """When all of it is expected to be free; infinite when an expected end is unknown."""

    keeps: Mapping[str, Assignment] = field(default_factory=dict)
    """What those jobs of `after` hold then that do not end but shrink or move."""

    tried_at: float = -math.inf
    """When a migration for this job was last looked for in vain."""


NodeState = Literal["up", "draining", "vacating", "down", "flapping"]
"""A draining node is left at the next checkpoint of whoever is there; a vacating one at once, saved or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that one cycle looks at. The cycle books on `room` what it decides (the caller hands in a copy)."""

    room: Room
    pending: Sequence[Ask]
    live: Mapping[str, Live]
    queues: Mapping[str, Queue] = field(default_factory=dict)
    nodes: Mapping[int, NodeState] = field(default_factory=dict)
    """Nodes that are not "up", by index."""

    spares: frozenset[int] = frozenset()
    """Nodes held back for replacing failed ones."""

    claims: Sequence[Claim] = ()
    """`Decision.claims` of the cycle before. Without it the cycle works out reservations anew, but then room that a
    preemption frees is up for grabs."""

    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """A pending job gets its room."""

    job: str
    assignment: Assignment
    why: str
    backfilled: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """Running jobs give their room back, as one set, so that `beneficiary` fits afterwards."""

    victims: tuple[str, ...]
    beneficiary: str
    lost_seconds: float
    """Work of all victims since their last checkpoints, in member-seconds of GPUs."""

    why: str


@dataclass(frozen=True, slots=True)
class Resize:
    """An elastic job grows into idle room or shrinks to its minimum; members that stay keep rank and node."""

    job: str
    assignment: Assignment
    why: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Members on lost or draining nodes go elsewhere inside the same domain; the others stay."""

    job: str
    assignment: Assignment
    lost_nodes: tuple[int, ...]
    used_spares: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """A job cannot go on where it is (no replacement in its domain): it stops and waits for a new place."""

    job: str
    why: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """Jobs move at their next checkpoint so that `beneficiary` fits. Each moves once; all leave before the first
    takes its new place (they may swap)."""

    moves: tuple[tuple[str, Assignment], ...]
    beneficiary: str
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a pending job got nothing in this cycle."""

    job: str
    cause: Literal["resources", "fragmentation", "quota", "reservation", "behind", "nodes_away"]
    sentence: str


Action = Start | Preempt | Resize | Replace | Requeue | Migrate


@dataclass(frozen=True, slots=True)
class Decision:
    """What a cycle decided, in the order in which it must be carried out, and why the others wait."""

    actions: tuple[Action, ...]
    waits: Mapping[str, Wait]
    claims: tuple[Claim, ...] = ()
    """Hand them to the next cycle as `View.claims`; store them before the actions are carried out."""
