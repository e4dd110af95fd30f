"""Owns what a node's past says about its future: up, draining, down or flapping, with damping of nodes that flap.

Damping follows route flap damping of BGP (RFC 2439, section 4.2): every failure adds a penalty, the penalty decays
exponentially, above `suppress` the node gets no new work, and it comes back when the penalty has fallen below `reuse`.
Two points differ from a route, on purpose:
- The penalty stands still while the node is down (RFC 2439 allows a decay of its own for that time): only time that a
  node is up shows that it is stable.
- The ceiling is given as the longest stable time that a node can be asked for, `longest_seconds`.

With the defaults a node that fails every 30 s is suppressed at its third failure, and however long it went on like
that, it comes back after at most 15 minutes of being up. One failure alone never suppresses a node.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reflux_placement.policy.view import NodeState
from reflux_placement.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Damping:
    """The rule; penalties are plain numbers, only their ratios matter. Raises ValueError for a rule without effect."""

    penalty: float = 1000.0
    """Added by one failure."""

    suppress: float = 2000.0
    """A node above this gets no new work."""

    reuse: float = 750.0
    """A suppressed node below this gets work again."""

    half_life_seconds: float = 300.0
    """Time of being up in which the penalty halves."""

    longest_seconds: float = 900.0
    """Most stable time that is asked of a node; bounds the penalty."""

    def __post_init__(self) -> None:
        if not 0 < self.reuse < self.suppress or self.penalty <= 0:
            raise ValueError(f"damping: write 0 < reuse ({self.reuse}) < suppress ({self.suppress}) and penalty > 0")
        if self.half_life_seconds <= 0:
            raise ValueError(f"damping.half_life_seconds = {self.half_life_seconds}: must be above zero")
        if self.ceiling <= self.suppress:
            raise ValueError(
                f"damping.longest_seconds = {self.longest_seconds}: the penalty can never pass suppress; "
                f"write more than {self.half_life_seconds * math.log2(self.suppress / self.reuse):.0f} s"
            )

    @property
    def ceiling(self) -> float:
        """Largest penalty: it decays to `reuse` in `longest_seconds` (RFC 2439, 4.8.1)."""
        return self.reuse * 2.0 ** (self.longest_seconds / self.half_life_seconds)


DEFAULT_DAMPING = Damping()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What is remembered of one node; `to_plain` and `from_plain` carry it through a store. Times on the caller's
    clock, in seconds."""

    reachable: bool = True
    draining: bool = False
    draining_since: float = 0.0
    """When the operator's word came; 0 when it was taken back."""

    suppressed: bool = False
    penalty: float = 0.0
    """As of `at`."""

    at: float = 0.0
    failures: int = 0
    """How often it was lost, ever."""

    def to_plain(self) -> dict[str, bool | int | float]:
        """As a dict of numbers and booleans."""
        return asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, bool | int | float]) -> "NodeHealth":
        """The inverse of `to_plain`. Raises TypeError for a field that does not exist."""
        return NodeHealth(**values)  # pyright: ignore[reportArgumentType]


HEALTHY = NodeHealth()


def advance(health: NodeHealth, now: float, damping: Damping = DEFAULT_DAMPING) -> NodeHealth:
    """The health at `now` when nothing happened since. A clock that runs backwards changes nothing."""
    elapsed = max(0.0, now - health.at)
    if not health.reachable:
        return replace(health, at=max(now, health.at))
    penalty = health.penalty * 2.0 ** (-elapsed / damping.half_life_seconds)
    suppressed = health.suppressed and penalty >= damping.reuse
    return replace(health, penalty=penalty, suppressed=suppressed, at=max(now, health.at))


def observe(
    health: NodeHealth, *, reachable: bool, now: float, restarted: bool = False, damping: Damping = DEFAULT_DAMPING
) -> NodeHealth:
    """The health after looking at the node at `now`.

    Only the change from up to down counts as a failure, however often a dead node is looked at. `restarted` says that
    the node was lost and came back between two looks (another boot or agent identity): that is a failure as well.
    """
    health = advance(health, now, damping)
    failed = health.reachable and (restarted or not reachable)
    if failed:
        penalty = min(health.penalty + damping.penalty, damping.ceiling)
        suppressed = health.suppressed or penalty > damping.suppress
        health = replace(health, penalty=penalty, suppressed=suppressed, failures=health.failures + 1)
    return replace(health, reachable=reachable)


def drain(health: NodeHealth, draining: bool, now: float = 0.0) -> NodeHealth:
    """An operator's word at `now`: no new work, and what runs there moves at its next checkpoint
    (`spares.replace_lost`). How long that is waited for is the caller's: see `draining_since`."""
    if draining == health.draining:
        return health
    return replace(health, draining=draining, draining_since=now if draining else 0.0)


def state_of(health: NodeHealth, now: float, damping: Damping = DEFAULT_DAMPING) -> NodeState:
    """What the policy may do with the node: down beats draining beats flapping beats up."""
    if not health.reachable:
        return "down"
    if health.draining:
        return "draining"
    return "flapping" if advance(health, now, damping).suppressed else "up"


def back_at(health: NodeHealth, now: float, damping: Damping = DEFAULT_DAMPING) -> float | None:
    """When a flapping node gets work again if it stays up from `now` on (a time for the next look); None when it is not
    suppressed. For a node that is down: as if it came up now."""
    health = advance(health, now, damping)
    if not health.suppressed:
        return None
    return now + damping.half_life_seconds * math.log2(health.penalty / damping.reuse)


def node_states(
    topology: Topology, health: Mapping[str, NodeHealth], now: float, damping: Damping = DEFAULT_DAMPING
) -> dict[int, NodeState]:
    """`View.nodes`: the state of every node that is not up, by index. Names that the topology lacks are left out."""
    states: dict[int, NodeState] = {
        topology.index_of(name): state_of(each, now, damping) for name, each in health.items() if name in topology
    }
    return {node: states[node] for node in sorted(states) if states[node] != "up"}


def open_nodes(topology: Topology, states: Mapping[int, NodeState], spares: frozenset[int]) -> NDArray[np.bool_]:
    """`Room.open_N`: nodes that take new work are up and not held back as spares."""
    open_N = np.ones(topology.num_nodes, dtype=bool)
    open_N[[*states, *spares]] = False
    return open_N
