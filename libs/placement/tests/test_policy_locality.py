import numpy as np
import pytest

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import decide
from reflux_placement.policy.view import Ask, Live, Start, View
from reflux_placement.room import Room
from reflux_placement.simulate.clusters import TRAY, grid

TWO_RACKS = grid("two", racks=2, nodes_per_rack=4, racks_per_block=2)


def ask(name, count, *, number=0, seconds=600.0, prefers="", submitted_at=0.0):
    gang = GangDemand(roles=(RoleDemand(role="worker", count=count, each=TRAY),), preferred_level=prefers)
    return Ask(job=name, number=number, gang=gang, submitted_at=submitted_at, expected_seconds=seconds)


def view_with(nodes, pending, *, now=0.0, ends=1_000.0):
    """A cluster where one job that cannot move holds these nodes."""
    holder = ask("holder", len(nodes), seconds=ends)
    room = Room(TWO_RACKS)
    room.take("holder", holder.gang, Assignment("cluster", 0, {"worker": np.array(nodes)}))
    live = {"holder": Live(ask=holder, started_at=0.0, saved_at=0.0)}
    return View(room=room, pending=pending, live=live, now=now)


def starts(view, **knobs):
    return [action.job for action in decide(view, PolicyConfig(**knobs)).actions if isinstance(action, Start)]


@pytest.mark.parametrize(("waited", "expected"), [(0.0, []), (3_599.0, []), (3_600.0, ["gang"])])
def test_a_gang_takes_pieces_of_two_racks_only_when_it_has_waited_for_one(waited, expected):
    view = view_with([0, 1, 4, 5], [ask("gang", 3, prefers="rack")], now=waited, ends=9_000.0)
    assert starts(view, locality_patience_seconds=3_600.0) == expected


def test_a_gang_that_no_rack_could_hold_does_not_wait_for_one():
    assert starts(view_with([0], [ask("gang", 6, prefers="rack")])) == ["gang"]


def test_a_gang_without_a_preference_does_not_wait():
    assert starts(view_with([0, 1, 4, 5], [ask("gang", 3)])) == ["gang"]


@pytest.mark.parametrize(("order", "first"), [("area", "small"), ("arrival", "large")])
def test_behind_a_blocked_ask_the_smallest_area_or_the_oldest_is_backfilled(order, first):
    pending = [ask("head", 8, number=0), ask("large", 3, number=1, seconds=800.0), ask("small", 2, number=2)]
    assert starts(view_with([0, 1, 2, 3], pending), backfill_order=order)[0] == first


def test_an_ask_of_unknown_length_comes_behind_all_that_said_theirs():
    pending = [ask("head", 8, number=0), ask("silent", 1, number=1, seconds=0.0), ask("told", 4, number=2)]
    assert starts(view_with([0, 1, 2, 3], pending)) == ["told"]


def test_an_order_of_backfill_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="backfill_order = 'size': write area or arrival"):
        PolicyConfig(backfill_order="size")
