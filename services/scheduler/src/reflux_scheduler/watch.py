"""Owns what silence, news of the cluster and failed starts say about nodes: who is doubted, lost, or to blame."""

import time
from collections.abc import Mapping, Sequence

from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import NodeCondition
from reflux_scheduler.book import Book
from reflux_scheduler.fleet import Fleet, Post
from reflux_scheduler.grants import Grants
from reflux_scheduler.job import Job
from reflux_scheduler.nodes import Nodes

_UP = NodeCondition("up")
_NO_AGENT = NodeCondition("down", "no agent")


class Watch:
    """Brings `Nodes` up to date. Times are monotonic, in seconds."""

    def __init__(self, book: Book, nodes: Nodes, fleet: Fleet, grants: Grants) -> None:
        self._book = book
        self._nodes = nodes
        self._fleet = fleet
        self._grants = grants
        self._topology: Topology = nodes.topology
        self._lost_posts: dict[Post, str] = {}
        self._down: dict[int, bool] = {}
        self._blamed: set[str] = set()

    def lost_posts(self, now: float) -> Mapping[Post, str]:
        """Posts with jobs whose agents are gone for good, or whose grants lost the node, and why."""
        lost: dict[Post, str] = {}
        for post, why in self._grants.lost_posts().items():
            if post in self._book.posts:
                lost[post] = why
        for post in self._fleet.silent(self._book.posts.keys(), now):
            if post not in lost and any(self._was_there(self._book.get(job), post) for job in self._book.at(post)):
                silent = self._fleet.silent_seconds(post, now)
                lost[post] = f"node {post[0]} is lost: its agent was silent for {silent:.0f} s"
        self._lost_posts = lost
        return lost

    def look(self) -> bool:
        """Brings node states up to date; whether the policy has something new to think of."""
        doubted: frozenset[int] = frozenset()
        lost = {node: why for (node, grant), why in self._lost_posts.items() if grant}
        if self._grants.shared_agents:
            news, doubted = self._news_of_agents(time.monotonic())
        elif self._grants.known:
            news = self._grants.take_news()
        else:
            return False  # No node takes work before the cluster was asked for the first time.
        failed, stopped = dict(self._fleet.take_restarts()), self._fleet.stopped()
        failed |= dict.fromkeys(self._blamed, self._nodes.failures_to_flap)
        self._blamed.clear()
        return self._nodes.look(news, doubted, lost, time.time(), failed=failed, stopped=stopped)

    def blame(self, nodes: Sequence[str]) -> None:
        """Nodes on which no agent came in time get no new work until they were quiet; unless there are so many that it
        is not the nodes."""
        flapping = sum(state == "flapping" for state in self._nodes.states.values())
        if 2 * (flapping + len(self._blamed.union(nodes))) <= self._topology.num_nodes:
            self._blamed.update(nodes)
            self.look()

    def _news_of_agents(self, now: float) -> tuple[dict[str, NodeCondition], frozenset[int]]:
        """Nodes whose own agents came or went for good, and those whose agents are silent for a while or leave.

        Silence is no failure before it is over the lease: a scheduler that stood still for a moment finds all silent.
        """
        fleet, news = self._fleet, {}
        heard_at = {node: agent.heard_at for (node, grant), agent in fleet.agents().items() if not grant}
        doubted: set[int] = set()
        stopped = fleet.stopped()
        never = fleet.never_heard_seconds(now) >= fleet.terms.lost_seconds
        for index, node in enumerate(self._topology.nodes):
            heard = heard_at.get(node.name)
            down = never if heard is None else now - heard >= fleet.terms.lost_seconds
            if down is not self._down.get(index):
                self._down[index] = down
                news[node.name] = _NO_AGENT if down else _UP
            if not down and (heard is None or node.name in stopped or now - heard >= fleet.terms.doubt_seconds):
                doubted.add(index)
        return news, frozenset(doubted)

    @staticmethod
    def _was_there(job: Job, post: Post) -> bool:
        """Whether an agent at this post is expected to speak: nodes' own agents always are, those of a grant once a
        member ran under them."""
        if not post[1]:
            return True
        return any(
            status.incarnation and (status.node, job.grant_id(status.part)) == post for status in job.members.values()
        )
