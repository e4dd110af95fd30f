import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_sandbox.jobs import Grade
from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.release import all_failed, is_audited, released_on
from reflux_sandbox.ladder.selection import Answer, ValuePolicy, audit, estimates, plan
from reflux_sandbox.ladder.value import Forecaster, leads

POLICY = ValuePolicy(least_pairs=8)


def forecaster(seed=0, count=200):
    """Low cheap rewards mean 0, high ones 1, and between 0.4 and 0.6 nobody knows."""
    dice = np.random.default_rng(seed)
    cheap = dice.random(count)
    full = np.where(cheap < 0.4, 0.0, np.where(cheap > 0.6, 1.0, dice.random(count) < 0.5))
    return Forecaster([Record(cheap=c, lead=0.0, full=f, cpu_seconds=2.0) for c, f in zip(cheap, full, strict=True)])


def group(*cheap, **changes):
    return [dataclasses.replace(Answer(cheap=reward), **changes) for reward in cheap]


def test_only_the_uncertain_answer_is_verified():
    chosen = plan(group(0.1, 0.5, 0.9), forecaster(), POLICY, exempt=False, cost_seconds=1.0)
    assert list(chosen.wanted) == [1]
    assert chosen.wanted[1] > 0
    assert chosen.later == {0, 2}


def test_a_group_without_doubt_is_cancelled():
    certain = plan(group(0.1, 0.2, 0.9), forecaster(), POLICY, exempt=False, cost_seconds=1.0)
    assert (dict(certain.wanted), set(certain.skipped)) == ({}, {0, 1, 2})
    assert set(certain.skipped.values()) <= {"decided", "negligible"}
    alike = plan(group(0.5, copies=8), forecaster(), POLICY, exempt=False, cost_seconds=1.0)
    assert dict(alike.skipped) == {0: "decided"}


def test_what_cannot_be_forecast_is_verified():
    assert set(plan(group(0.1, 0.9), Forecaster([]), POLICY, exempt=False, cost_seconds=1.0).wanted) == {0, 1}
    blind = plan(group(None, 0.1), forecaster(), POLICY, exempt=False, cost_seconds=1.0)
    assert set(blind.wanted) == {0}
    assert set(plan(group(0.1, 0.9), forecaster(), POLICY, exempt=True, cost_seconds=1.0).wanted) == {0, 1}


def test_stale_groups_and_spent_budgets_cancel_all_but_audited_groups():
    policy = dataclasses.replace(POLICY, max_lag=4)
    stale = plan(group(0.5, 0.5), forecaster(), policy, exempt=False, cost_seconds=1.0, lag=5)
    assert dict(stale.skipped) == {0: "stale", 1: "stale"}
    assert plan(group(0.5, 0.5), forecaster(), policy, exempt=False, cost_seconds=1.0, lag=4).wanted
    assert plan(group(0.5, 0.5), forecaster(), policy, exempt=True, cost_seconds=1.0, lag=5).wanted
    poor = plan(group(0.5, 0.9), forecaster(), POLICY, exempt=False, cost_seconds=1.0, budget_left=2.5)
    assert (list(poor.wanted), dict(poor.skipped)) == ([0], {1: "budget"})
    started = plan(group(0.5, 0.9, started=True), forecaster(), POLICY, exempt=False, cost_seconds=1.0, budget_left=0.0)
    assert list(started.wanted) == [0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_every_open_answer_is_wanted_skipped_or_waits_and_no_ended_one_is(cheap, ended):
    answers = [
        dataclasses.replace(each, full=0.5 if i < ended else None, ended=i < ended)
        for i, each in enumerate(group(*cheap))
    ]
    chosen = plan(answers, forecaster(), POLICY, exempt=False, cost_seconds=1.0)
    parts = [set(chosen.wanted), set(chosen.skipped), set(chosen.later)]
    assert set.union(*parts) == set(range(min(ended, len(cheap)), len(cheap)))
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_an_audit_plays_the_selection_and_measures_its_error():
    known = [
        Answer(cheap=c, lead=lead, full=f, ended=True)
        for c, f, lead in zip((0.1, 0.5, 0.9), (1.0, 1.0, 1.0), leads([0.1, 0.5, 0.9]), strict=True)
    ]
    played = audit(known, forecaster(), POLICY, 1.0)
    assert 1 in played.verified
    assert 0 not in played.verified
    assert played.advantage_error > 0.3  # the first is not the 0 that was forecast
    blameless = audit([dataclasses.replace(known[0], full=0.0), *known[1:]], forecaster(), POLICY, 1.0)
    assert blameless.advantage_error == pytest.approx(0.0, abs=1e-6)
    assert audit([Answer(cheap=0.5, ended=True)], forecaster(), POLICY, 1.0).advantage_error == 0.0


def test_estimates_are_full_rewards_then_forecasts_then_nothing():
    answers = [
        Answer(cheap=0.9, full=0.2, ended=True),
        Answer(cheap=0.9),
        Answer(cheap=None),
        Answer(cheap=0.9, ended=True),
    ]
    found = estimates(answers, forecaster(), POLICY)
    assert found[0] == 0.2
    assert found[1] == pytest.approx(1.0, abs=0.1)
    assert found[2:] == [None, None]


def test_release_waits_for_full_without_trust_and_ends_at_the_rule_when_all_fail():
    assert released_on("surrogate", ["rule", "surrogate"], trusted=True, failed=False) == "surrogate"
    assert released_on("surrogate", ["rule", "surrogate"], trusted=False, failed=False) is None
    assert released_on("surrogate", ["rule", "surrogate", "full"], trusted=False, failed=False) == "full"
    assert released_on("full", ["rule", "surrogate"], trusted=True, failed=False) is None
    assert released_on("surrogate", ["rule"], trusted=False, failed=True) == "rule"
    zero, invalid, late = Grade(outcome="scored"), Grade(outcome="invalid"), Grade(outcome="timeout")
    assert all_failed([zero, invalid])
    assert not all_failed([zero, late])
    assert not all_failed([zero, Grade(outcome="scored", reward=0.1)])


def test_the_audit_draw_is_fixed_and_has_its_share():
    drawn = [is_audited(1, "run", str(number), 0.1) for number in range(4000)]
    assert drawn == [is_audited(1, "run", str(number), 0.1) for number in range(4000)]
    assert 0.08 < sum(drawn) / 4000 < 0.12
    assert all(is_audited(1, "run", str(number), 1.0) for number in range(50))
