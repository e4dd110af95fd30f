"""The curriculum by pass rate: its weights, its choices, and whole runs with it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from counting_task import CountingOptions, CountingTask
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import from_url
from trainer_world import Run, config, create, finish, short

from reflux_trainer.curriculum import CANDIDATES, MAX_STRATA, PassRates
from reflux_trainer.figures import curriculum_figures, known_rates
from reflux_trainer.problems import chosen_problem
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.queue.records import Grade, Group, Sample

strata = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6)
observed = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0.0, 1.0)), max_size=60)


@given(observed, strata, st.floats(0.0, 1.0, exclude_max=True))
def test_every_choice_is_one_of_the_candidates_and_every_kind_keeps_a_share(
    seen: list[tuple[str, float]], asked: list[str], draw: float
) -> None:
    rates = PassRates()
    for stratum, solved in seen:
        rates.observe(stratum, solved)
    assert 0 <= rates.choose(asked, draw) < len(asked)
    assert all(0.0 <= rate <= 1.0 for rate in rates.rates.values())
    assert all(0.1 <= rates.weight(stratum) <= 1.0 for stratum in asked)


def test_kinds_are_chosen_in_proportion_to_their_learnability() -> None:
    rates = PassRates({"never": 0.0, "half": 0.5, "tenth": 0.1, "always": 1.0})
    asked = ["never", "half", "tenth", "always"]
    draws = (np.arange(20_000) + 0.5) / 20_000
    counts = Counter(asked[rates.choose(asked, draw)] for draw in draws.tolist())
    weights = {"never": 0.1, "half": 1.0, "tenth": 0.36, "always": 0.1}
    for name, weight in weights.items():
        assert counts[name] / 20_000 == pytest.approx(weight / sum(weights.values()), abs=1e-3)


def test_a_rate_follows_the_policy_that_changes() -> None:
    rates = PassRates()
    for _ in range(60):
        rates.observe("hard", 0.0)
    assert rates.weight("hard") < 0.2
    for _ in range(14):
        rates.observe("hard", 1.0)
    assert rates.rates["hard"] == pytest.approx(0.5, abs=0.05)
    assert rates.weight("hard") > 0.95


def test_a_task_with_any_number_of_kinds_takes_bounded_memory() -> None:
    rates = PassRates()
    for number in range(10 * MAX_STRATA):
        rates.observe(f"kind {number}", 1.0)
    assert len(rates.rates) <= MAX_STRATA


def test_no_problem_is_asked_twice_and_without_rates_none_is_left_out() -> None:
    task = CountingTask(0, CountingOptions())
    rates = PassRates({"even": 0.5, "odd": 0.0})
    chosen = [chosen_problem(task, rates, 7, index) for index in range(400)]
    assert chosen == sorted(set(chosen))
    assert all(number // CANDIDATES == index for index, number in enumerate(chosen))
    assert sum(number % 2 == 0 for number in chosen) / 400 == pytest.approx(1.0 / 1.1, abs=0.06)
    assert chosen == [chosen_problem(task, rates, 7, index) for index in range(400)]
    assert [chosen_problem(task, None, 7, index) for index in range(5)] == list(range(5))


def test_a_rate_counts_answers_that_are_wholly_right_and_no_others() -> None:
    rates, grades = (
        PassRates(),
        [Grade("scored", 1.0), Grade("scored", 0.9), Grade("invalid", 0.0), Grade("timeout", 1.0)],
    )
    sample = Sample([1], [-1.0], "stop", [])
    group = Group(0, 0, [1], [sample] * 4, grades, 0.0, 0.0, 0.0, 0.0, 0.0, "w", stratum="a")
    figures = curriculum_figures(rates, [group])
    assert rates.rates["a"] == pytest.approx(0.5 + 0.05 * (1 / 3 - 0.5))
    assert figures == {"curriculum/pass_rate/a": rates.rates["a"], "curriculum/share/a": 1.0}


async def test_a_run_asks_by_pass_rate_and_its_ledger_stays_whole(world) -> None:
    async with world.trainer() as stub:
        run = await create(stub, config(rl={"curriculum": "pass_rate", "steps": 6}))
        ended = (await finish(world, stub, run))[-1].run
        async with from_url(world.url) as client:
            counted = await client.hlen(RunKeys(short(run)).ledger)
    assert ended.state == Run.STATE_SUCCEEDED
    summary = json.loads((Path(ended.folder) / "summary.json").read_text())
    assert summary["ledger"]["violations"] == []
    assert summary["ledger"]["trained"] == 6 * 3
    assert counted >= 6 * 3
    events = [json.loads(line) for line in (Path(ended.folder) / "events.jsonl").read_text().splitlines()]
    rates = known_rates(events)
    assert set(rates) <= {"odd", "even"}
    last = [event for event in events if event["stage"] == "rl"][-1]["metrics"]
    assert {f"curriculum/pass_rate/{name}" for name in rates} <= set(last)
    shares = [value for name, value in last.items() if name.startswith("curriculum/share/")]
    assert sum(shares) == pytest.approx(1.0)
    samples = [json.loads(line) for line in (Path(ended.folder) / "samples.jsonl").read_text().splitlines()]
    asked = [each for each in samples if each["stage"] == "rl"]
    assert asked
    assert all(each["prompt"].split()[0] == each["truth"].split()[0] for each in asked)
