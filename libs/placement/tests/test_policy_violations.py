import sys
from pathlib import Path

import numpy as np
import pytest

from reflux_placement.policy import books, cycle, preempt, quota
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.fairshare import in_order

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "scheduler"))

import violations as driver


def test_random_events_starve_nobody_and_break_nothing() -> None:
    found = driver.violations(2000, seed=0)
    assert found.total == 0, found.notes
    assert min(found.actions[kind] for kind in ("Start", "Preempt", "Resize", "Replace")) > 0


def test_random_events_are_decided_the_same_way_twice() -> None:
    first, second = (driver.violations(150, seed=5) for _ in range(2))
    assert (first.cycles, first.actions) == (second.cycles, second.actions)


def _preempt_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preempt, "may_stop", lambda *_: True)


def _forget_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quota.Ledger, "excess", lambda *_, **__: [])


def _give_freed_room_away(patch: pytest.MonkeyPatch) -> None:
    withhold = books.Books.withhold

    def leaky(self, standing) -> None:
        withhold(self, standing)
        nodes_K, amounts_KR = self._withheld[standing.job]
        self.room.free_NR[nodes_K] += amounts_KR
        self._withheld[standing.job] = (nodes_K, np.zeros_like(amounts_KR))

    patch.setattr(books.Books, "withhold", leaky)


def _look_at_small_gangs_only(patch: pytest.MonkeyPatch) -> None:
    def small(pending, ledger, **_):
        return [ask for ask in in_order(pending, ledger) if ask.gang.roles[0].count < 4]

    patch.setattr(cycle, "in_order", small)


@pytest.mark.parametrize(
    ("mistake", "kind", "events"),
    [
        (_preempt_anybody, "preempted", 100),
        (_forget_limits, "quota", 400),
        (_give_freed_room_away, "lost", 400),
        (_look_at_small_gangs_only, "starved", 100),
    ],
)
def test_the_driver_notices_a_policy_that_makes_mistakes(monkeypatch, mistake, kind, events) -> None:
    mistake(monkeypatch)
    assert any(getattr(driver.violations(events, seed), kind) for seed in range(12))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(
    "config",
    [PolicyConfig(), PolicyConfig(reservations=3, backfill_depth=4, patience_seconds=60, backfill_order="arrival")],
)
def test_long_random_events_starve_nobody_and_break_nothing(seed, config) -> None:
    found = driver.violations(30_000, seed, config)
    assert found.total == 0, found.notes
