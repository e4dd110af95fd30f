"""Owns the names of policies that can be simulated: ours, and peers written from their published descriptions.

A peer is a placement rule (`place/rules.py`) under the queueing of `simulate/rivals.py`: FIFO with EASY backfill, the
same for each. "reflux-fifo" is our placement under that queueing: it tells what placement alone does.
"""

from collections.abc import Callable, Mapping, Sequence

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.rules.base import Rule as Placement
from reflux_placement.place.rules.first_fit import first_fit
from reflux_placement.place.rules.kueue import kueue_best_fit
from reflux_placement.place.rules.slurm import slurm_block
from reflux_placement.place.search import find_place
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import decide
from reflux_placement.room import Room
from reflux_placement.simulate.block_screen import block_screen
from reflux_placement.simulate.jobs import Policy
from reflux_placement.simulate.rivals import FifoBackfill, Screen

OURS = "reflux"
DEFAULTS = "reflux-defaults"
PATIENCE_SECONDS = 24 * 3600.0
"""How long gangs wait for their preferred level under "reflux", the one knob that is set: traces are of busy clusters
with long jobs. "reflux-defaults" is the policy as shipped."""


class UnknownPolicy(ValueError):
    """A name that no policy has; the message lists those that exist."""

    def __init__(self, name: str) -> None:
        super().__init__(f"policy {name!r} does not exist; there is {', '.join(POLICIES)}")
        self.name = name


def _ours(config: PolicyConfig) -> Callable[[], Policy]:
    """A maker of the production policy."""
    return lambda: lambda view: decide(view, config)


def _peer(place: Placement, screen: Screen | None = None) -> Callable[[], Policy]:
    """A maker of a placement under the peers' queueing."""

    def rule(room: Room, gang: GangDemand) -> Assignment | None:
        found = place(room, gang)
        return found if isinstance(found, Assignment) else None

    return lambda: FifoBackfill(rule, screen=screen)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    OURS: _ours(PolicyConfig(explain=False, locality_patience_seconds=PATIENCE_SECONDS)),
    DEFAULTS: _ours(PolicyConfig(explain=False)),
    "fifo-first-fit": _peer(first_fit),
    "kueue-best-fit": _peer(kueue_best_fit),
    "slurm-block": _peer(slurm_block, block_screen),
    "reflux-fifo": _peer(find_place),
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
