"""The contract between the scheduler and the cluster that it runs on: room for placed gangs, asked for and given back.

The scheduler decides where a gang goes; a backend makes the cluster give exactly that room, all of it or none, and runs
one `reflux-agent` on every node of it. Members are started through those agents in the same way everywhere, so a
backend knows nothing of roles, ranks, restarts or logs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reflux_placement.topology import NOTHING, Resources, Topology

NodeState = Literal["up", "draining", "down"]
GrantState = Literal["waiting", "granted", "ended"]


class BackendAway(ConnectionError):
    """The cluster does not answer; the same call may succeed soon, and may already have been carried out."""


class GrantRefused(RuntimeError):
    """The cluster will never give this room; the message says why in the cluster's words."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What one node gives to a grant."""

    node: str
    resources: Resources
    gpu_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Room that is asked for at once. Part 0 of a job is its gang; later parts are replacements and growth."""

    job_id: str
    part: int
    display_name: str
    shares: tuple[NodeShare, ...]
    domain: str = ""
    """Path of the tightest domain that holds the part, for people and for labels."""

    @property
    def id(self) -> str:
        """Written "{job}-{part}", unique for ever; also the idempotency key."""
        return f"{self.job_id}-{self.part}"


@dataclass(frozen=True, slots=True)
class GrantStatus:
    """What the cluster says of a grant."""

    id: str
    state: GrantState
    native: str = ""
    """How the cluster's own tools call it, for example "slurm job 17" or "jobset reflux-ab12-0"."""

    reason: str = ""
    """Why it waits or ended, in the cluster's words; empty when there is nothing to say."""

    lost_nodes: tuple[str, ...] = ()
    """Nodes of a granted part that the cluster took away or lost."""


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """Whether new work may go to a node."""

    state: NodeState
    reason: str = ""
    foreign: Resources = NOTHING
    """What jobs that are not of this scheduler hold on the node."""


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """How a backend starts the agent of a node. `environment` lacks what depends on node and grant; the backend adds
    REFLUX_AGENT_NODE and REFLUX_AGENT_GRANT. It holds the stack secret: never on a command line, never in a log."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Backend(ABC):
    """One cluster. Every call has a deadline of its own and raises BackendAway when the cluster does not answer.

    `request` and `release` are idempotent by grant id, because the scheduler repeats them after a crash or a lost
    answer: room that is granted stays as it is, a grant that ended is never granted again under the same id. What
    `grants` lists is the truth: after a restart the scheduler adopts the grants that it knows and releases the others.
    """

    shared_agents: bool = False
    """Nodes have agents of their own that serve every job; grants start none."""

    @abstractmethod
    async def discover(self) -> Topology | None:
        """The cluster's own topology; None when it has none and a file has to say."""

    @abstractmethod
    async def conditions(self) -> Mapping[str, NodeCondition]:
        """All nodes that the cluster knows, by name."""

    @abstractmethod
    async def request(self, grant: Grant) -> None:
        """Asks for room on exactly the grant's nodes. Raises GrantRefused when it will never be given."""

    @abstractmethod
    async def release(self, grant_id: str) -> None:
        """Gives room back, its agents and all processes below them included; a grant that is not there is no error."""

    @abstractmethod
    async def grants(self) -> Mapping[str, GrantStatus]:
        """All grants of this scheduler that the cluster still knows, by grant id; ended ones may be missing."""
