import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hypothesis import HealthCheck, given, settings
from place_worlds import exists, small_worlds

from reflux_placement.place.check import broken
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_worlds())
def test_a_place_is_found_exactly_when_one_exists_and_keeps_every_demand(world) -> None:
    room, gang = world
    answer = find_place(room, gang)
    if isinstance(answer, Misfit):
        assert not exists(room, gang), answer.sentence
    else:
        counts = {each.role: each.count for each in gang.roles}
        assert broken(room.topology, room.usable_NR(), gang, answer, counts) is None
