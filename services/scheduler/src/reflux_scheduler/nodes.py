"""Owns what is known of the nodes: who may take work, who is drained, who flaps, who is held back as a spare."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from reflux_placement.policy import health as damping
from reflux_placement.policy.health import DEFAULT_DAMPING, HEALTHY, Damping, NodeHealth
from reflux_placement.policy.spares import SpareRule, refresh
from reflux_placement.policy.view import NodeState
from reflux_placement.room import Room
from reflux_placement.topology import Ints, Topology
from reflux_scheduler.backends.base import NodeCondition

log = logging.getLogger(__name__)


_NONE_FAILED: Mapping[str, int] = {}


class Nodes:
    """States by name. Times are Unix times in seconds, because health outlives the process."""

    def __init__(self, topology: Topology, rule: SpareRule, flaps: Damping = DEFAULT_DAMPING) -> None:
        self.topology = topology
        self._rule = rule
        self._flaps = flaps
        self._said: dict[str, NodeCondition] = {}
        self._known: dict[str, NodeCondition] = {}
        self._lost: dict[str, str] = {}
        self._drained: set[str] = set()
        self._health: dict[str, NodeHealth] = {}
        self._unsaved: set[str] = set()
        self._returned: set[int] = set()
        self._foreign_NR: Ints = np.zeros_like(topology.capacity_NR)
        self.drains: dict[str, str] = {}
        self.spares: frozenset[int] = frozenset()
        self.states: dict[int, NodeState] = {}
        """Nodes that are not up, by index."""

        self.closed: frozenset[int] = frozenset(range(topology.num_nodes))
        """Nodes in doubt: no new work for now, but nothing is lost."""

    @property
    def failures_to_flap(self) -> int:
        """So many failures at once make a node flapping."""
        return int(self._flaps.suppress / self._flaps.penalty) + 1

    def restore(self, drains: Mapping[str, str], health: Mapping[str, Mapping[str, bool | int | float]]) -> None:
        """Takes over what the last scheduler knew."""
        self.drains = {node: why for node, why in drains.items() if node in self.topology}
        for node, values in health.items():
            try:
                self._health[node] = NodeHealth.from_plain(values)
            except TypeError:
                log.warning("what is stored of node %s was written by another version and is forgotten", node)

    def look(
        self,
        news: Mapping[str, NodeCondition],
        doubted: frozenset[int],
        lost: Mapping[str, str],
        now: float,
        *,
        failed: Mapping[str, int] = _NONE_FAILED,
        stopped: frozenset[str] = frozenset(),
    ) -> bool:
        """Takes in what the cluster and the agents say; whether the policy has anything new to think of.

        Args:
            news: what is said of nodes of which something else was said before.
            doubted: nodes whose agents are silent, but not for long.
            lost: nodes that are down although the backend may not say so yet, and why.
            now: Unix time.
            failed: how often nodes failed and came back between two looks.
            stopped: nodes whose agents were told to stop: that they are away is no failure.
        """
        self._said.update(news)
        first = not self._known
        watched = {*news, *lost, *failed, *self._lost, *self._health, *self.drains, *self._drained}
        if first:
            watched.update(node.name for node in self.topology.nodes)
        self._lost, self._drained = dict(lost), set(self.drains)
        states = dict(self.states)
        for name in watched:
            if name not in self.topology:
                continue
            condition = NodeCondition("down", lost[name]) if name in lost else self._said.get(name, _UNKNOWN)
            index = self.topology.index_of(name)
            state = self._seen(index, name, condition, now, failed.get(name, 0), name in stopped)
            states.pop(index, None)
            if state != "up":
                states[index] = state
        changed = self._note_foreign(news) or states != self.states or doubted != self.closed
        self.states, self.closed = states, doubted
        return changed

    def apply(self, room: Room) -> None:
        """Opens and closes nodes of a room, and says anew who is a spare."""
        self.spares = refresh(room, self._rule, self.states, self.spares, self._returned)
        self._returned.clear()
        room.open_N = self.open_nodes()

    def without_foreign(self, room: Room) -> Room:
        """A copy of a room without what others hold of it. Of what they hold only the part that is free there counts:
        what jobs hold stays theirs, also when both are more than the node has for a moment."""
        room = room.copy()
        room.free_NR -= np.minimum(self._foreign_NR, np.maximum(room.free_NR, 0))
        return room

    def open_nodes(self) -> NDArray[np.bool_]:
        """Which nodes take new work."""
        open_N = damping.open_nodes(self.topology, self.states, self.spares)
        open_N[list(self.closed)] = False
        return open_N

    def for_policy(self, now: float, drain_seconds: float) -> dict[int, NodeState]:
        """Nodes that are not up, by index; those that drain for longer than `drain_seconds` are left now."""
        overdue = {
            self.topology.index_of(name)
            for name, health in self._health.items()
            if health.draining and now - health.draining_since >= drain_seconds
        }
        return {
            index: "vacating" if state == "draining" and index in overdue else state
            for index, state in self.states.items()
        }

    def state(self, node: str) -> tuple[NodeState, str]:
        """A node's state and why it is not up."""
        state = self.states.get(self.topology.index_of(node), "up")
        if state == "up" and self.topology.index_of(node) in self.closed:
            return "down", "its agent is silent"
        if state == "draining":
            return state, self.drains.get(node) or self._known.get(node, _UNKNOWN).reason
        if state == "flapping":
            return state, f"failed {self._health[node].failures} times"
        return state, self._known.get(node, _UNKNOWN).reason if state != "up" else ""

    def absent(self, most: int = 5) -> str:
        """Nodes that are away, as the end of a sentence; empty when there are none."""
        away = sorted(self.closed | {index for index, state in self.states.items() if state == "down"})
        if not away:
            return ""
        named = ", ".join(self.topology.nodes[index].name for index in away[:most])
        return f"; {len(away)} node(s) are away: {named}{', ...' if len(away) > most else ''}"

    def unsaved(self) -> dict[str, dict[str, bool | int | float]]:
        """Health that changed since the last call, in plain form."""
        nodes, self._unsaved = self._unsaved, set()
        return {node: self._health.get(node, HEALTHY).to_plain() for node in nodes}

    def _note_foreign(self, news: Mapping[str, NodeCondition]) -> bool:
        """Takes in what others hold; whether it is something else than before."""
        changed = False
        for name, condition in news.items():
            if name in self.topology:
                held_R = self._foreign_NR[self.topology.index_of(name)]
                if tuple(held_R.tolist()) != condition.foreign.row:
                    held_R[:] = condition.foreign.row
                    changed = True
        return changed

    def _seen(
        self, index: int, name: str, condition: NodeCondition, now: float, failures: int, stopped: bool
    ) -> NodeState:
        reachable = condition.state != "down"
        before = self._known.get(name)
        self._known[name] = condition
        health = self._health.get(name, HEALTHY)
        if before is None and name not in self._health:
            # A first look is no failure: the node may never have been up.
            health = NodeHealth(reachable=reachable, at=now)
        after = health
        for _ in range(failures):
            after = damping.observe(after, reachable=reachable, restarted=True, now=now, damping=self._flaps)
        if stopped:
            after = replace(damping.advance(after, now, self._flaps), reachable=reachable)
        else:
            after = damping.observe(after, reachable=reachable, now=now, damping=self._flaps)
        after = damping.drain(after, name in self.drains or condition.state == "draining", now)
        told = (health.failures, health.reachable, health.draining)
        if (after.failures, after.reachable, after.draining) != told:
            self._unsaved.add(name)
        if after.reachable and not health.reachable:
            self._returned.add(index)
        state = damping.state_of(after, now, self._flaps)
        if state == "flapping" and self.topology.num_nodes == 1:
            state = "up"  # There is no other place.
        if state == "up" and after.penalty < 1.0:
            self._health.pop(name, None)
        else:
            self._health[name] = after
        return state


_UNKNOWN = NodeCondition("down", "the cluster does not know it")
