"""The values of a job: where it is, what is known of its members, what happened; `spec` has what was asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from reflux_scheduler.spec import JobSpec

State = Literal["PENDING", "PLACED", "STARTING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
FinalState = Literal["SUCCEEDED", "FAILED", "CANCELLED"]
FINAL: tuple[str, ...] = get_args(FinalState)

MemberState = Literal["waiting", "running", "restarting", "succeeded", "failed", "stopped", "lost"]
DONE: tuple[str, ...] = ("succeeded", "failed", "stopped", "lost")
MAX_EVENTS = 50


@dataclass(frozen=True, slots=True)
class RolePlaces:
    """Where the members of one role are, by rank: kept as columns, because a gang has thousands of them."""

    role: str
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    """Bit masks over the GPU indices of the node."""

    parts: tuple[int, ...]
    """Number of the grant that holds the member's room."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The tightest domain that holds the whole gang, and its members (roles in the order asked)."""

    level: str
    domain: str
    roles: tuple[RolePlaces, ...]

    @property
    def num_members(self) -> int:
        """Members of all roles."""
        return sum(len(places.nodes) for places in self.roles)

    def seats(self) -> "Iterator[Seat]":
        """Every member's place, ranks ascending."""
        for places in self.roles:
            columns = zip(places.nodes, places.gpus, places.parts, strict=True)
            for rank, (node, gpus, part) in enumerate(columns):
                yield Seat(places.role, rank, node, gpus, part)

    def seat(self, role: str, rank: int) -> "Seat | None":
        """The place of one member; None when the gang has no such rank (any more)."""
        for places in self.roles:
            if places.role == role and rank < len(places.nodes):
                return Seat(role, rank, places.nodes[rank], places.gpus[rank], places.parts[rank])
        return None

    def nodes(self) -> frozenset[str]:
        """All nodes with a member."""
        return frozenset(node for places in self.roles for node in places.nodes)


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one member."""

    role: str
    rank: int
    node: str
    gpus: int
    part: int

    @property
    def label(self) -> str:
        """How people call the member."""
        return f"{self.role}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Part:
    """Room that was asked of the cluster as one. Part 0 of an attempt is the gang, later ones grow or replace."""

    number: int
    state: Literal["waiting", "granted"] = "waiting"
    native: str = ""
    reason: str = ""
    granted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What is known of one member that was started or lost. `incarnation` names the agent process that runs it."""

    role: str
    rank: int
    node: str
    part: int = 0
    state: MemberState = "waiting"
    incarnation: str = ""
    revision: int = 0
    pid: int = 0
    restarts: int = 0
    exit_code: int = 0
    rss_bytes: int = 0
    log_path: str = ""
    message: str = ""
    started_at: float = 0.0
    losses: tuple[float, ...] = ()
    """When it was lost with its agent and had to be started anew; counts against the role's max_restarts."""

    carried_restarts: int = 0
    """Restarts before the present incarnation."""

    @property
    def label(self) -> str:
        """How people call it."""
        return f"{self.role}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says about one member."""

    role_id: str
    state: MemberState
    pid: int = 0
    restarts: int = 0
    exit_code: int = 0
    rss_bytes: int = 0
    log_path: str = ""
    message: str = ""
    revision: int = 0
    started_at: float = 0.0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """The latest word of one agent: its incarnation, and its reports by role id."""

    incarnation: str
    reports: Mapping[str, Report]


@dataclass(frozen=True, slots=True)
class Event:
    """One change, for people and watchers."""

    sequence: int
    time: float
    kind: str
    text: str
    member: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job that still has members will end: for good, or "PENDING", back in the queue."""

    state: FinalState | Literal["PENDING"]
    cause: str
    was_pending: bool = False
    """It was on its way back into the queue before it was ended for good: its room is promised to others already."""

    @property
    def gave_room_away(self) -> bool:
        """Whether the plan may have others where the members still stand."""
        return self.was_pending or self.state == "PENDING"


@dataclass(frozen=True, slots=True)
class Job:
    """One job. `number` orders the queue."""

    id: str
    number: int
    spec: JobSpec
    created_at: float
    state: State = "PENDING"
    placement: Placement | None = None
    members: Mapping[str, MemberStatus] = field(default_factory=dict)
    """By label; a member that nothing is known of yet is missing and counts as waiting."""

    parts: tuple[Part, ...] = ()
    """Room that the cluster was asked for and that was not given back yet; empty where nodes have their own agents."""

    next_part: int = 0
    """Numbers of parts are never used twice."""

    retiring: tuple[Seat, ...] = ()
    """Places that were left by shrinking or moving and whose processes may still run."""

    stranded: tuple[Seat, ...] = ()
    """Places that were left and that the cluster does not take back before the rest of their part."""

    next_placement: Placement | None = None
    """With an ending of "PENDING": where it goes at once (migration)."""

    message: str = ""
    ending: Ending | None = None
    queued_at: float = 0.0
    """Since when it waits: its creation, or its last way back into the queue."""

    placed_at: float = 0.0
    started_at: float = 0.0
    """When the members of the present attempt were told to start."""

    running_at: float = 0.0
    saved_at: float = 0.0
    ended_at: float = 0.0
    attempt: int = 0
    preemptions: int = 0
    requeues: int = 0
    slow_starts: int = 0
    """Attempts in a row that did not start in time."""

    grow_after: float = 0.0
    """Until then it does not grow: the cluster did not give the room."""

    preempted_by: str = ""
    sequence: int = 0
    events: tuple[Event, ...] = field(default=())

    @property
    def name(self) -> str:
        """Resource name."""
        return f"jobs/{self.id}"

    @property
    def final(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in FINAL

    @property
    def num_members(self) -> int:
        """Members that have a place."""
        return self.placement.num_members if self.placement is not None else 0

    def role_id(self, member: MemberStatus | Seat) -> str:
        """The id under which agents know a member."""
        return f"{self.id}/{member.role}/{member.rank}"

    def grant_id(self, part: int) -> str:
        """The grant whose agents run the members of a part; empty where nodes have their own agents."""
        return f"{self.id}-{part}" if self.parts else ""

    def status(self, seat: Seat) -> MemberStatus:
        """What is known of a member."""
        known = self.members.get(seat.label)
        return known if known is not None else MemberStatus(seat.role, seat.rank, seat.node, seat.part)
