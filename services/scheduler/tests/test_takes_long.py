"""Which decisions are made in a thread, so that agents and clients are answered meanwhile."""

import pytest

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.view import Ask, View
from reflux_placement.room import Room
from reflux_placement.simulate.clusters import grid
from reflux_placement.topology import Resources
from reflux_scheduler.view import takes_long

SMALL, LARGE = (Room(grid("c", racks=racks)) for racks in (8, 160))
GANG = GangDemand(roles=(RoleDemand(role="w", count=1, each=Resources(gpus=1)),))


@pytest.mark.parametrize(
    ("room", "pending", "waited", "last_seconds", "knobs", "aside"),
    [
        (SMALL, 8, 1e6, 0.01, {}, False),
        (SMALL, 9, 0.0, 0.01, {}, True),
        (SMALL, 1, 0.0, 0.02, {}, True),
        (LARGE, 1, 299.0, 0.01, {}, False),
        (LARGE, 1, 300.0, 0.01, {}, True),
        (LARGE, 0, 300.0, 0.01, {}, False),
        (LARGE, 1, 300.0, 0.01, {"defragmentation": False}, False),
        (LARGE, 1, 300.0, 0.01, {"defragmentation_moves": 200}, False),
    ],
)
def test_a_decision_that_may_search_for_a_migration_on_a_large_cluster_is_made_aside(
    room, pending, waited, last_seconds, knobs, aside
):
    asks = [Ask(job=f"j{n}", number=n, gang=GANG, submitted_at=1e9 - waited) for n in range(pending)]
    view = View(room=room, pending=asks, live={}, now=1e9)
    assert takes_long(view, PolicyConfig(**knobs), last_seconds) is aside
