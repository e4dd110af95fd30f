import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import decide
from reflux_placement.policy.locality import patience_seconds
from reflux_placement.policy.view import Ask, Live, Start, View
from reflux_placement.room import Room
from reflux_placement.simulate.clusters import TRAY, grid
from reflux_placement.simulate.engine import simulate
from reflux_placement.simulate.jobs import Options, SimJob

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


@pytest.mark.parametrize(("runs", "patience"), [(0.0, 300.0), (60.0, 300.0), (7_200.0, 7_200.0), (864_000.0, 86_400.0)])
def test_as_shipped_a_gang_waits_for_its_rack_as_long_as_it_will_run_within_five_minutes_and_a_day(runs, patience):
    pending = [ask("gang", 3, prefers="rack", seconds=runs)]
    for waited, expected in ((patience - 1.0, []), (patience, ["gang"])):
        assert starts(view_with([0, 1, 4, 5], pending, now=waited, ends=1e6)) == expected


def test_without_a_share_of_the_run_time_all_gangs_wait_equally_long():
    pending = [ask("gang", 3, prefers="rack", seconds=7_200.0)]
    assert starts(view_with([0, 1, 4, 5], pending, now=300.0, ends=1e6), locality_patience_share=0.0) == ["gang"]


def test_a_gang_that_gives_its_rack_up_delays_nobody_who_was_promised_room_before_it():
    """The wide job is promised all nodes at 1,000 s; the gang's patience is over, but it would run past that."""
    pending = [ask("wide", 8, number=0), ask("gang", 3, number=1, prefers="rack", seconds=2_000.0)]
    assert starts(view_with([0, 1, 4, 5], pending, now=500.0), locality_patience_share=0.0) == []
    short = [pending[0], ask("gang", 3, number=1, prefers="rack", seconds=400.0)]
    assert starts(view_with([0, 1, 4, 5], short, now=500.0), locality_patience_share=0.0) == ["gang"]


def test_room_in_the_rack_that_a_gang_waits_for_is_kept_from_those_who_would_delay_it():
    pending = [ask("gang", 3, number=0, prefers="rack", seconds=7_200.0), ask("late", 4, number=1, seconds=9_000.0)]
    decision = decide(view_with([0, 1, 4, 5], pending, now=600.0))
    (promise,) = decision.claims
    assert (promise.job, promise.due_at, decision.actions) == ("gang", 1_000.0, ())
    fits_behind = [pending[0], ask("late", 3, number=1, seconds=300.0)]
    assert starts(view_with([0, 1, 4, 5], fits_behind, now=600.0)) == ["late"]


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e7), st.floats(0, 1e7), st.floats(0, 1e5), st.floats(0, 100), st.floats(0, 1e6))
def test_patience_is_bounded_and_grows_with_the_run_time(runs, longer, least, share, longest):
    knobs = PolicyConfig(
        locality_patience_seconds=least, locality_patience_share=share, locality_patience_longest_seconds=longest
    )
    less, more = (patience_seconds(ask("g", 2, seconds=each), knobs) for each in sorted((runs, longer)))
    assert least <= less <= more <= max(least, longest)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(10, 4_000), st.integers(0, 3_000)), min_size=5, max_size=25))
def test_nobody_starves_while_gangs_wait_for_racks(drawn):
    """When the last patience is over, somebody runs at any time until all have run."""
    jobs = [
        SimJob(name=f"j{number}", gang=ask("", count, prefers="rack").gang, arrives_at=at, seconds=seconds)
        for number, (count, seconds, at) in enumerate(drawn)
    ]
    history = simulate(TWO_RACKS, jobs, decide, options=Options(wake_seconds=60.0))
    run_seconds = [job.seconds for job in jobs]
    calm_at = max(job.arrives_at for job in jobs) + max(300.0, *run_seconds)
    assert max(record.ended_at for record in history.records) <= calm_at + sum(run_seconds) + 60.0


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
