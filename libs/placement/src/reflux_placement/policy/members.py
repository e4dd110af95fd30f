"""Owns the members of a running gang as `extend` takes them: who stays on which node, and how many are wanted."""

from collections.abc import Collection, Mapping

from reflux_placement.gang import Assignment
from reflux_placement.place.extend import extend
from reflux_placement.place.misfit import Misfit
from reflux_placement.room import Holding, Room

Kept = dict[str, dict[int, int]]
"""Node index by role and rank."""


def kept_members(holding: Holding, lost: Collection[int]) -> Kept:
    """Rank -> node of the members that do not sit on `lost` nodes, for every role (the form that `extend` takes)."""
    return {
        demand.role: {
            rank: int(node)
            for rank, node in enumerate(holding.assignment.nodes.get(demand.role, ()))
            if int(node) not in lost
        }
        for demand in holding.demand.roles
    }


def current_counts(holding: Holding) -> dict[str, int]:
    """Members of every role as held now (the form that `extend` takes)."""
    return {demand.role: len(holding.assignment.nodes.get(demand.role, ())) for demand in holding.demand.roles}


def resized(room: Room, holding: Holding, sizes: Mapping[str, int]) -> Assignment | Misfit:
    """The same gang with other sizes of some roles; members that stay keep rank and node. `room` does not hold it."""
    counts = current_counts(holding) | dict(sizes)
    kept = {
        role: {rank: node for rank, node in ranks.items() if rank < counts[role]}
        for role, ranks in kept_members(holding, ()).items()
    }
    return extend(room, holding.demand, kept, counts)


def size_changes(before: Assignment, after: Assignment) -> str:
    """Old and new sizes of the roles that change, for people."""
    sizes = [
        f"{role} {len(before.nodes.get(role, ()))} -> {len(ranks)}"
        for role, ranks in after.nodes.items()
        if len(ranks) != len(before.nodes.get(role, ()))
    ]
    return ", ".join(sizes)
