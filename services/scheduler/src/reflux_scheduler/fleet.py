"""Owns what is known of the agents: address, incarnation, when each was heard last, and its latest reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reflux_scheduler.errors import SupersededAgent, UnknownAgent
from reflux_scheduler.job import Report


@dataclass(frozen=True, slots=True)
class Terms:
    """The lease, in seconds."""

    lease_seconds: float = 60.0
    """An agent that hears nothing for this long stops its members."""

    heartbeat_seconds: float = 2.0

    margin_seconds: float = 15.0
    """What the scheduler waits longer than the agent before it takes the members for gone (grace of their stop)."""

    @property
    def doubt_seconds(self) -> float:
        """A node that was silent for this long gets no new work."""
        return min(self.lease_seconds, 3 * self.heartbeat_seconds)

    @property
    def lost_seconds(self) -> float:
        """A node that was silent for this long is lost."""
        return self.lease_seconds + self.margin_seconds


@dataclass(slots=True)
class Agent:
    """One registered agent."""

    address: str
    incarnation: str
    heard_at: float
    reports: Mapping[str, Report] = field(default_factory=dict)


class Fleet:
    """Agents by node. Times come from a monotonic clock, in seconds."""

    def __init__(self, terms: Terms, started_at: float) -> None:
        self.terms = terms
        self._started_at = started_at
        self._agents: dict[str, Agent] = {}

    def register(self, node: str, address: str, incarnation: str, reports: Iterable[Report], now: float) -> None:
        """A new agent, or the same one again; the latest owns the node."""
        self._agents[node] = Agent(address, incarnation, now, {report.role_id: report for report in reports})

    def heartbeat(self, node: str, incarnation: str, reports: Iterable[Report], now: float) -> None:
        """Renews a lease.

        Raises:
            UnknownAgent: nobody is registered for the node, it has to register first.
            SupersededAgent: another agent serves the node now, this one has to leave.
        """
        agent = self._agents.get(node)
        if agent is None:
            raise UnknownAgent(f"no agent is registered for node {node!r}")
        if agent.incarnation != incarnation:
            raise SupersededAgent(f"node {node!r} is served by the agent at {agent.address} now")
        agent.heard_at = now
        agent.reports = {report.role_id: report for report in reports}

    def agent(self, node: str) -> Agent | None:
        """The agent of a node."""
        return self._agents.get(node)

    def agents(self) -> Mapping[str, Agent]:
        """All agents by node."""
        return self._agents

    def available(self, now: float) -> frozenset[str]:
        """Nodes that new work may go to."""
        return frozenset(
            node for node, agent in self._agents.items() if now - agent.heard_at < self.terms.doubt_seconds
        )

    def silent_seconds(self, node: str, now: float) -> float:
        """How long nothing was heard from a node; counted from the start of the scheduler when it never spoke."""
        agent = self._agents.get(node)
        return now - (agent.heard_at if agent else self._started_at)

    def is_lost(self, node: str, now: float) -> bool:
        """Whether the members of a node are gone for sure."""
        return self.silent_seconds(node, now) >= self.terms.lost_seconds
