"""Owns what is known of the agents: address, incarnation, when each was heard last, and its latest reports.

An agent serves one node, for every job (grant "") or for one grant only.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from reflux_scheduler.errors import SupersededAgent, UnknownAgent
from reflux_scheduler.job import Heard, Report

Post = tuple[str, str]
"""Node and grant of an agent."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The lease of an agent, in seconds."""

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
    left: bool = False
    """It was told to stop and said so."""


class Fleet:
    """Agents by post. Times come from a monotonic clock, in seconds. From `started_at` on agents that never spoke are
    silent."""

    def __init__(self, terms: Terms, started_at: float) -> None:
        self.terms = terms
        self._started_at = started_at
        self._agents: dict[Post, Agent] = {}
        self._fresh: set[Post] = set()
        self._restarts: Counter[str] = Counter()
        self.registrations = 0
        """Grows with every registration, and every goodbye."""

    def register(self, post: Post, address: str, incarnation: str, reports: Iterable[Report], now: float) -> None:
        """A new agent, or the same one again; the latest owns the post."""
        before = self._agents.get(post)
        if before is not None and before.incarnation != incarnation and not before.left and not post[1]:
            self._restarts[post[0]] += 1
        self._agents[post] = Agent(address, incarnation, now, {report.role_id: report for report in reports})
        self._fresh.add(post)
        self.registrations += 1

    def heartbeat(self, post: Post, incarnation: str, reports: Iterable[Report], now: float) -> None:
        """Renews a lease.

        Raises:
            UnknownAgent: nobody is registered for the post, it has to register first.
            SupersededAgent: another agent serves the post now, this one has to leave.
        """
        agent = self._agents.get(post)
        if agent is None:
            raise UnknownAgent(f"no agent is registered for node {post[0]!r}, grant {post[1]!r}")
        if agent.incarnation != incarnation:
            raise SupersededAgent(f"node {post[0]!r} is served by the agent at {agent.address} now")
        agent.heard_at = now
        latest = {report.role_id: report for report in reports}
        if latest != agent.reports:
            self._fresh.add(post)
        agent.reports = latest

    def leave(self, post: Post) -> None:
        """An agent was told to stop and said so."""
        self._agents[post].left = True
        self.registrations += 1

    def take_restarts(self) -> Mapping[str, int]:
        """How often nodes' own agents were replaced without having said goodbye, since the last call."""
        restarts, self._restarts = self._restarts, Counter()
        return restarts

    def stopped(self) -> frozenset[str]:
        """Nodes whose own agents were told to stop."""
        return frozenset(node for (node, grant), agent in self._agents.items() if agent.left and not grant)

    def agent(self, post: Post) -> Agent | None:
        """The agent of a post."""
        return self._agents.get(post)

    def agents(self) -> Mapping[Post, Agent]:
        """All agents."""
        return self._agents

    def fresh(self) -> dict[Post, Heard]:
        """Posts with news since the last call; it forgets them."""
        posts, self._fresh = self._fresh, set()
        return {post: self.heard(post) for post in posts if post in self._agents}

    def heard(self, post: Post) -> Heard:
        """The latest word of an agent that is registered."""
        agent = self._agents[post]
        return Heard(agent.incarnation, agent.reports)

    def of_grant(self, grant_id: str) -> list[Post]:
        """Posts of the agents of a grant."""
        return [post for post in self._agents if post[1] == grant_id]

    def forget(self, post: Post) -> None:
        """Its grant is over."""
        self._agents.pop(post, None)

    def keep(self, grant_ids: Collection[str]) -> None:
        """Forgets agents of grants that are not among these. One that still speaks has to register at each heartbeat,
        and is told what to stop."""
        for post in [post for post in self._agents if post[1] and post[1] not in grant_ids]:
            self.forget(post)

    def silent(self, posts: Iterable[Post], now: float) -> list[Post]:
        """Of these posts the ones that are lost: silent for so long that their members are gone for sure."""
        seconds = self.terms.lost_seconds
        agents = self._agents
        lost = [post for post in posts if (agent := agents.get(post)) is not None and now - agent.heard_at >= seconds]
        return lost + [post for post in posts if post not in agents and self.is_lost(post, now)]

    def is_available(self, post: Post, now: float) -> bool:
        """Whether new work may go there."""
        agent = self._agents.get(post)
        return agent is not None and not agent.left and now - agent.heard_at < self.terms.doubt_seconds

    def silent_seconds(self, post: Post, now: float) -> float:
        """How long nothing was heard from a post; of one that never spoke, since silence counts."""
        agent = self._agents.get(post)
        return max(0.0, now - (agent.heard_at if agent else self._started_at))

    def never_heard_seconds(self, now: float) -> float:
        """How long a node's own agent that never spoke was waited for."""
        return max(0.0, now - self._started_at)

    def is_lost(self, post: Post, now: float) -> bool:
        """Whether the members of a post are gone for sure."""
        return self.silent_seconds(post, now) >= self.terms.lost_seconds
