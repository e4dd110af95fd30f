"""Owns the names of policies that can be simulated: ours, and peers written from their published descriptions.

A peer is a placement rule (`place/rules.py`) under the queueing of `simulate/rivals.py`: FIFO with EASY backfill, the
same for each. "reflux-fifo" is our placement under that queueing: it tells what placement alone does.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.search import find_place
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import decide
from reflux_placement.room import Room
from reflux_placement.simulate.fragmentation import slots
from reflux_placement.simulate.jobs import Policy
from reflux_placement.simulate.rivals import FifoBackfill, Rule

OURS = "reflux"


class UnknownPolicy(ValueError):
    """A name that no policy has; the message lists those that exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"policy {name!r} does not exist; there is {', '.join(POLICIES)}")
        self.name = name


def first_fit(room: Room, gang: GangDemand) -> Assignment | None:
    """Every member on the first node that holds it, in topology order."""
    free = room.usable_NR().copy()
    nodes = {}
    for role in gang.roles:
        held = np.minimum(slots(free, role.each), role.count)
        upto = np.cumsum(held)
        if upto[-1] < role.count:
            return None
        last = int(np.searchsorted(upto, role.count))
        held = held[: last + 1]
        held[last] -= upto[last] - role.count
        nodes[role.role] = np.repeat(np.arange(last + 1), held)
        free[: last + 1] -= held[:, None] * np.array(role.each.row)
    return Assignment("cluster", 0, nodes)


def _ours() -> Policy:

    config = PolicyConfig(explain=False)
    return lambda view: decide(view, config)


def _found(room: Room, gang: GangDemand) -> Assignment | None:
    found = find_place(room, gang)
    return found if isinstance(found, Assignment) else None


def _peer(rule: Rule) -> Callable[[], Policy]:
    return lambda: FifoBackfill(rule)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    OURS: _ours,
    "fifo-first-fit": _peer(first_fit),
    "reflux-fifo": _peer(_found),
}
"""Makers by name. A policy may keep a cache, so each run gets one of its own."""

RIVALS = tuple(name for name in POLICIES if not name.startswith("reflux"))


def chosen(names: Sequence[str]) -> dict[str, Policy]:
    """Policies by name, in order, each once; "all" stands for every rival. Raises UnknownPolicy."""
    wanted: list[str] = []
    for name in names:
        wanted += RIVALS if name == "all" else [name]
    for name in wanted:
        if name not in POLICIES:
            raise UnknownPolicy(name)
    return {name: POLICIES[name]() for name in dict.fromkeys(wanted)}
