"""The values of a job: what was asked, what is known of its members, what happened."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from reflux_scheduler.gang import GangDemand, Member, Placement, RoleDemand
from reflux_scheduler.topology import Level, Resources

State = Literal["PENDING", "PLACED", "STARTING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
FinalState = Literal["SUCCEEDED", "FAILED", "CANCELLED"]
FINAL: tuple[str, ...] = get_args(FinalState)

MemberState = Literal["waiting", "running", "restarting", "succeeded", "failed", "stopped"]
DONE: tuple[str, ...] = ("succeeded", "failed", "stopped")
MAX_EVENTS = 50


@dataclass(frozen=True, slots=True)
class RoleTemplate:
    """One role as requested. `serves` marks roles that run until the others are done."""

    name: str
    count: int
    each: Resources
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    max_restarts: int = 0
    required_level: Level = "cluster"
    serves: bool = False
    stop_grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a client asked for."""

    display_name: str
    roles: tuple[RoleTemplate, ...]
    required_level: Level = "cluster"

    def demand(self) -> GangDemand:
        """The part that placement looks at. Raises InvalidJob when it contradicts itself."""
        demands = tuple(RoleDemand(role.name, role.count, role.each, role.required_level) for role in self.roles)
        return GangDemand(demands, self.required_level)

    def role(self, name: str) -> RoleTemplate:
        """The template of a role."""
        return next(role for role in self.roles if role.name == name)


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What is known of one member. `incarnation` names the agent process that runs it."""

    role: str
    rank: int
    node: str
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
    """How a job that still has members will end."""

    state: FinalState
    cause: str


@dataclass(frozen=True, slots=True)
class Job:
    """One job. `number` orders the queue."""

    id: str
    number: int
    spec: JobSpec
    created_at: float
    state: State = "PENDING"
    placement: Placement | None = None
    members: tuple[MemberStatus, ...] = ()
    message: str = ""
    ending: Ending | None = None
    placed_at: float = 0.0
    ended_at: float = 0.0
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

    def role_id(self, member: MemberStatus | Member) -> str:
        """The id under which agents know a member."""
        return f"{self.id}/{member.role}/{member.rank}"
