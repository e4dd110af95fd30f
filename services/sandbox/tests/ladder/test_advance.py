"""One group step by step: what is released, corrected, left open and settled, in whatever order verdicts come."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_sandbox.jobs import Grade
from reflux_sandbox.ladder.advance import News, RunView, advance
from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.selection import ValuePolicy
from reflux_sandbox.ladder.settlement import is_over, settle
from reflux_sandbox.ladder.state import (
    Corrected,
    FullEnd,
    LadderSpec,
    LadderState,
    Released,
    Unresolved,
)
from reflux_sandbox.ladder.value import Forecaster

RUNGS = {"rule": "t/rule", "surrogate": "t/surrogate", "full": "t/full"}
NEVER = ValuePolicy(audit_share=1e-9, least_pairs=8)


def spec(answers=("a", "b", "b"), **changes):
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    fields = {
        "ladder_id": "0" * 32,
        "run": "run",
        "group": "7",
        "payload": "{}",
        "answers": answers,
        "sample_ids": tuple(f"7/{number}" for number in range(len(answers))),
        "policy_version": 3,
        "verifiers": RUNGS,
        "release": "surrogate",
        "kinds": tuple(numbers[answer] for answer in answers),
        "value": NEVER,
    }
    return LadderSpec(**(fields | changes))


def scored(*rewards):
    return tuple(Grade(outcome="scored", reward=reward) for reward in rewards)


def ended(reward=None, outcome="scored", cpu=2.0):
    return FullEnd(grade=Grade(outcome=outcome, reward=reward or 0.0), cpu_seconds=cpu)


def certain():
    """A window in which the cheap reward is the full one."""
    values = np.linspace(0, 1, 200)
    return Forecaster([Record(cheap=value, lead=0.0, full=value, cpu_seconds=2.0) for value in values])


TRUSTED = RunView(trusted=True)
INFORMED = RunView(trusted=True, forecaster=certain())


def go(asked, state, view=TRUSTED, **news):
    return advance(asked, state, News(**news), view, 1000.0)


def climbed(asked, view=TRUSTED, surrogate=(0.2, 0.8, 0.8)):
    """State and events behind the surrogate."""
    step = go(asked, LadderState(), view)
    assert step.climb == "rule"
    step = go(asked, step.state, view, rungs={"rule": scored(1, 1, 0)})
    assert (step.climb, step.events) == ("surrogate", ())
    return go(asked, step.state, view, rungs={"surrogate": scored(*surrogate)})


def test_a_trusted_group_is_released_on_the_surrogate_and_each_different_answer_is_verified_once():
    step = climbed(spec())
    assert step.events == (Released(rung="surrogate", grades=scored(0.2, 0.8, 0.8), final=False),)
    assert set(step.priorities) == {0, 1}
    assert step.state.released_at == 1000.0


def test_a_full_reward_corrects_every_sample_with_that_answer():
    step = go(spec(), climbed(spec()).state, full={1: ended(0.5)})
    corrections = [event for event in step.events if isinstance(event, Corrected)]
    assert [(event.sample, event.provisional, event.final) for event in corrections] == [(1, 0.8, 0.5), (2, 0.8, 0.5)]
    assert go(spec(), step.state, full={1: ended(0.9)}).events == ()  # told once, whatever comes again


@pytest.mark.parametrize("outcome", ["timeout", "infra_error", "cancelled"])
def test_an_unknown_outcome_is_told_and_never_becomes_a_reward(outcome):
    asked = spec()
    state = go(asked, climbed(asked).state, full={0: ended(0.4)}).state
    step = go(asked, state, full={1: ended(outcome=outcome)})
    assert [event.sample for event in step.events if isinstance(event, Unresolved)] == [1, 2]
    assert not any(isinstance(event, Corrected) for event in step.events)
    over = settle(asked, step.state, TRUSTED)
    assert [row.reward for row in over.event.samples] == [0.4, None, None]
    assert [record.full for record in over.records] == [0.4, None]


def test_without_trust_the_release_waits_for_full_and_nothing_is_corrected():
    distrusted = RunView()
    step = climbed(spec(), distrusted)
    assert step.events == ()
    assert set(step.priorities) == {0, 1}
    step = go(spec(), step.state, distrusted, full={0: ended(0.1)})
    assert step.events == ()
    step = go(spec(), step.state, distrusted, full={1: ended(outcome="timeout")})
    (released,) = step.events
    assert (released.rung, released.final) == ("full", True)
    assert [grade.outcome for grade in released.grades] == ["scored", "timeout", "timeout"]


def test_trust_that_comes_late_releases_and_tells_what_was_known_before():
    waiting = go(spec(), climbed(spec(), RunView()).state, RunView(), full={0: ended(0.1)}).state
    released, correction = go(spec(), waiting, TRUSTED).events
    assert released.rung == "surrogate"
    assert (correction.sample, correction.final) == (0, 0.1)


def test_a_group_that_fails_the_rule_check_ends_there():
    step = go(spec(), LadderState(), rungs={"rule": (*scored(0, 0), Grade(outcome="invalid"))})
    (released,) = step.events
    assert (released.rung, released.final, step.climb) == ("rule", True, None)
    assert is_over(spec(), step.state)
    over = settle(spec(), step.state, TRUSTED)
    assert [(row.reward, row.basis) for row in over.event.samples] == [(0.0, "released")] * 3
    assert over.records == ()


def test_a_group_without_any_cheap_reward_waits_for_full():
    late = tuple(Grade(outcome="timeout") for _ in range(3))
    state = go(spec(), LadderState(), rungs={"rule": scored(1, 1, 1), "surrogate": late})
    assert state.events == ()
    assert set(state.priorities) == {0, 1}


def test_what_is_certain_is_skipped_and_counts_with_its_forecast():
    step = climbed(spec(), INFORMED)
    assert set(step.state.skipped.values()) <= {"decided", "negligible"}
    assert step.priorities == {}
    over = settle(spec(), step.state, INFORMED)
    assert [row.basis for row in over.event.samples] == ["forecast"] * 3
    assert [row.reward for row in over.event.samples] == pytest.approx([0.2, 0.8, 0.8], abs=0.05)
    assert over.counts["cpu_seconds_saved"] == pytest.approx(4.0, abs=0.1)
    assert [record.full for record in over.records] == [None, None]


def test_an_audited_group_is_verified_in_full_and_measures_what_skipping_would_have_cost():
    asked = spec(value=dataclasses.replace(NEVER, audit_share=1.0))
    step = climbed(asked, INFORMED)
    assert set(step.priorities) == {0, 1}
    state = go(asked, step.state, INFORMED, full={0: ended(0.9), 1: ended(0.8)}).state
    over = settle(asked, state, INFORMED)
    assert over.counts["audited_groups"] == 1
    assert over.counts["advantage_error"] > 0.5  # 0.2 was forecast, and the order was the other way round
    assert [record.weight for record in over.records] == [1.0, 1.0]
    rare = spec(value=dataclasses.replace(NEVER, audit_share=0.99))
    assert rare.audited
    weights = [record.weight for record in settle(rare, state, INFORMED).records]
    assert weights == pytest.approx([1 / 0.99] * 2)


def test_a_stale_group_is_given_up_but_an_audited_one_is_not():
    old = RunView(trusted=True, forecaster=certain(), newest_version=9)
    value = dataclasses.replace(NEVER, max_lag=4, tolerated_error=0.0)
    asked = spec(value=value)
    assert set(climbed(asked, old).state.skipped.values()) == {"stale"}
    assert climbed(spec(value=dataclasses.replace(value, audit_share=1.0)), old).state.skipped == {}


def test_a_cancelled_group_settles_with_what_is_known():
    state = go(spec(), climbed(spec()).state, full={0: ended(0.4)}).state
    over = settle(spec(), go(spec(), state, cancelled=True).state, TRUSTED)
    assert [(row.reward, row.skipped) for row in over.event.samples] == [(0.4, "")] + [(None, "cancelled")] * 2
    unreleased = go(spec(), LadderState(), cancelled=True).state
    assert settle(spec(), unreleased, TRUSTED).event.released_on is None


def test_a_budget_holds_what_is_under_way():
    asked = spec(value=dataclasses.replace(NEVER, budget_cpu_seconds=10.0, tolerated_error=0.0))
    noisy = RunView(
        trusted=True,
        forecaster=Forecaster(
            [Record(cheap=c, lead=0.0, full=float(i % 2), cpu_seconds=2.0) for i, c in enumerate(np.linspace(0, 1, 64))]
        ),
        spent_cpu_seconds=9.0,
    )
    assert set(climbed(asked, noisy).state.skipped.values()) == {"budget"}
    rich = climbed(asked, dataclasses.replace(noisy, spent_cpu_seconds=0.0)).state
    assert rich.skipped == {}
    assert sum(rich.reserved.values()) > 0
    done = go(asked, rich, noisy, full={kind: ended(0.5) for kind in rich.started}).state
    assert not set(done.reserved) & set(rich.started)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_events_are_told_once_whatever_the_order_and_however_often_news_repeat(data):
    asked = spec(("a", "b", "c", "b"))
    view = data.draw(st.sampled_from([TRUSTED, INFORMED, RunView()]))
    ends = {kind: data.draw(st.sampled_from([ended(0.3), ended(1.0), ended(outcome="timeout")])) for kind in range(3)}
    pieces = [{"rungs": {"rule": scored(1, 0, 1, 0)}}, {"rungs": {"surrogate": scored(0.1, 0.5, 0.9, 0.5)}}]
    order = [*pieces, *data.draw(st.permutations([{"full": {kind: end}} for kind, end in ends.items()]))]
    state, events = LadderState(), []
    for news in order:
        for _ in range(data.draw(st.integers(1, 2))):
            wanted = state.open if "full" in news else None
            if wanted is not None and not set(news["full"]) <= wanted:
                continue
            step = go(asked, LadderState.from_json(state.to_json()), view, **news)
            state, events = step.state, [*events, *step.events]
    while not is_over(asked, state):  # those that waited for their turn
        step = go(asked, state, view, full={kind: ends[kind] for kind in state.open})
        state, events = step.state, [*events, *step.events]
    assert sum(isinstance(event, Released) for event in events) == 1
    late = [event.sample for event in events if isinstance(event, Corrected | Unresolved)]
    assert len(late) == len(set(late))
    over = settle(asked, state, view)
    told = {event.sample: event.final for event in events if isinstance(event, Corrected)}
    for sample, row in enumerate(over.event.samples):
        if row.basis == "full" and state.released_on == "surrogate":
            assert told[sample] == row.reward
        assert (sample in late) == (state.released_on == "surrogate" and asked.kinds[sample] in state.full)
    assert LadderSpec.from_json(asked.to_json()) == asked
    assert LadderState.from_json(over.state.to_json()) == over.state
