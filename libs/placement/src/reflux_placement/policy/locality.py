"""Owns how long a gang waits for its preferred level: a preference is a demand at first, and only a preference later.

A gang that starts in pieces stays so for all of its run; room inside one domain often comes free soon. Slurm offers
the same trade as `--switches=count@max-time`. What a gang in pieces loses grows with its run, so does its patience:

    patience = max(locality_patience_seconds, min(share * expected_seconds, longest))

It counts from the submission, so it is the same after a restart, and nobody waits for ever.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from reflux_placement.gang import GangDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.search import fits_ever
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import Ask
from reflux_placement.topology import CLUSTER, Topology


def patience_seconds(ask: Ask, config: PolicyConfig) -> float:
    """How long an ask waits for its preferred level, in seconds since its submission. One of unknown length waits for
    the least."""
    in_proportion = config.locality_patience_share * ask.expected_seconds
    return max(config.locality_patience_seconds, min(in_proportion, config.locality_patience_longest_seconds))


def held_together(pending: Sequence[Ask], topology: Topology, now: float, config: PolicyConfig) -> list[Ask]:
    """The asks with their gangs' preferred level as the required one, where an empty domain of that level holds the
    gang and the ask has waited for less than its patience. Other asks are the same objects as before.

    Raises:
        UnknownLevel: a gang prefers a level that the topology does not have.
    """
    asks = []
    for ask in pending:
        waits = ask.gang.preferred_level and now - ask.submitted_at < patience_seconds(ask, config)
        tight = _tight(topology, ask.gang) if waits else None
        asks.append(ask if tight is None else replace(ask, gang=tight))
    return asks


@lru_cache(maxsize=16_384)
def _tight(topology: Topology, gang: GangDemand) -> GangDemand | None:
    """The gang with its preference as a demand; None if it prefers nothing tighter, or would not fit there ever."""
    if sum(role.count for role in gang.roles) < 2:
        return None
    if topology.tightness(gang.preferred_level) >= topology.tightness(gang.required_level):
        return None
    tight = replace(gang, required_level=gang.preferred_level)
    return tight if _could_hold(topology, tight) else None


def _could_hold(topology: Topology, gang: GangDemand) -> bool:
    """Whether the gang fits on the empty cluster. Sums decide for one plain role; others are searched for."""
    role = gang.roles[0]
    if len(gang.roles) > 1 or role.segment_size or role.max_per_domain or role.required_level != CLUSTER:
        return fits_ever(topology, gang) is None
    copies_N = copies_per_node(topology.capacity_NR, role.each)
    return int(topology.sums(copies_N, topology.tightness(gang.required_level)).max(initial=0)) >= role.least
