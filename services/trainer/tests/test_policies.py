"""Pure policies: window and lag, batch composition, learning rate, run states, watchdog."""

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_kit.errors import WrongState
from reflux_runs import config
from reflux_runs.config import RlConfig, RunConfig
from reflux_runs.preflight import derive
from reflux_trainer.advantages import advantages_of, loss_config, training_batch
from reflux_trainer.algo.registry import ALGORITHMS
from reflux_trainer.backlog import Backlog, closing_of, closing_without_groups
from reflux_trainer.consume import explain
from reflux_trainer.evaluate import set_figures
from reflux_trainer.figures import lag_counts
from reflux_trainer.problems import sampling_seed
from reflux_trainer.queue.groups import DeadPrompt
from reflux_trainer.queue.records import Grade, Group, Prompt, Sample, Span
from reflux_trainer.records import ENDED, STATES, RunRecord
from reflux_trainer.schedule import learning_rate
from reflux_trainer.staleness.registry import POLICIES, Staleness
from reflux_trainer.watchdog import WORKER_FORGOTTEN_ROUNDS, NoProgress, Waits, WorkersGone, WorkerWatch
from reflux_trainer.window import Window


def group(index, rewards=(0.0, 1.0), version=0):
    """A group with one sample per reward; None is an unknown one."""
    grades = [Grade("timeout", 0.0) if reward is None else Grade("scored", reward) for reward in rewards]
    samples = [Sample([5, 6], [-1.0, -1.0], "stop", [Span(version, 0, 2)]) for _ in rewards]
    return Group(index, version, [1, 2], samples, grades, 0.0, 0.0, 0.1, 0.2, 1.0, "w", entry=f"{index}-0")


@pytest.mark.parametrize(
    ("rewards", "closing"),
    [
        ((0.0, 1.0), None),
        ((0.5, 0.5), "filtered"),
        ((None, 1.0), "unknown"),
        ((None, None), "unknown"),
        ((None, 1.0, 0.0), None),
        ((None, 1.0, 1.0), "filtered"),
    ],
)
def test_groups_are_dropped_on_known_raw_rewards_only(rewards, closing):
    assert closing_of(group(0, rewards)) == closing


@pytest.mark.parametrize(
    ("rewards", "says"),
    [((1.0, 1.0), "the task is solved"), ((0.0, 0.0), "warm up longer"), ((None, None), "no reward is known")],
)
def test_nothing_to_learn_says_whether_the_task_is_solved_or_hopeless(rewards, says):
    dropped = [(group(index, rewards), closing_of(group(index, rewards))) for index in range(3)]
    assert says in explain(dropped)


def prompt(index, version=0):
    return Prompt(index, [1], {}, version, 0.0)


def backlog_of(policy, *, size, max_lag, opened=None):
    chosen = POLICIES[policy](groups_per_step=size, max_lag=max_lag)
    return Backlog(chosen, next_index=0, opened=opened or {}), chosen


def test_a_batch_waits_for_its_next_index_and_skips_what_was_dropped():
    backlog, _ = backlog_of("wait", size=2, max_lag=1, opened={0: 0, 2: 0, 3: 0})
    assert backlog.add(group(1)) is None, "prompt 1 was closed before"
    assert backlog.add(group(3)) is None
    assert backlog.add(group(2, (1.0, 1.0))) == "filtered"
    assert backlog.take(0) is None, "prompt 0 is missing"
    assert backlog.missing() == "prompt 0 (1 are out)"
    assert backlog.add(group(0)) is None
    assert [each.index for each in backlog.take(0)] == [0, 3]
    assert backlog.add(group(3)) is None, "a group that was consumed is ignored"
    backlog.issued([prompt(4), prompt(5)])
    assert backlog.low_water_index == 4
    assert backlog.take(0) is None


def test_pace_takes_what_is_there_until_a_straggler_would_become_too_old():
    backlog, _ = backlog_of("pace", size=1, max_lag=1, opened={0: 0, 1: 0})
    backlog.add(group(1))
    assert [each.index for each in backlog.take(0)] == [1], "prompt 0 has one more version"
    backlog.issued([prompt(2, 1)])
    backlog.add(group(2, version=1))
    assert backlog.take(1) is None, "prompt 0 is due now"
    backlog.add(group(0))
    assert [each.index for each in backlog.take(1)] == [0]
    assert [each.index for each in backlog.take(2)] == [2]


def test_drop_waits_for_nobody_and_discards_what_comes_too_late():
    backlog, _ = backlog_of("drop", size=1, max_lag=1, opened={0: 0, 1: 0, 2: 1})
    backlog.add(group(2, version=1))
    assert [each.index for each in backlog.take(2)] == [2]
    backlog.add(group(0))
    assert backlog.take(2) is None
    assert [each.index for each in backlog.discard_stale(2)] == [0]
    assert backlog.low_water_index == 1


@pytest.mark.parametrize("policy", ["wait", "pace", "drop"])
@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 12), st.integers(0, 10_000))
def test_the_lag_bound_holds_and_no_run_gets_stuck(policy, max_lag, size, steps, seed):
    """Plays the loop with random delays, filters and deaths; every trained group keeps the bound."""
    chance = random.Random(seed)
    backlog, chosen = backlog_of(policy, size=size, max_lag=max_lag)
    window = Window(capacity=chosen.max_open, groups_per_step=size, steps_left=steps)
    issued, flying, trained, dropped, discarded = 0, {}, [], 0, 0
    learner = fleet = 0
    while learner < steps:
        window.wanted = chance.randint(min(2 * size, window.capacity), window.capacity)
        for _ in range(window.allowance()):
            flying[issued] = fleet
            backlog.issued([prompt(issued, fleet)])
            issued += 1
            window.issued(1)
        assert window.open <= (max_lag + 1) * size
        if fleet < learner and (chance.random() < 0.5 or not flying):  # the sync ends at last
            fleet = learner
            window.released(size)
            continue
        if flying:
            index = chance.choice(sorted(flying))
            version = flying.pop(index)
            kind = chance.random()
            arrival = (
                DeadPrompt(index, "e") if kind < 0.05 else group(index, (1.0, 1.0) if kind < 0.3 else (0, 1), version)
            )
            if backlog.add(arrival):
                dropped += 1
                window.dropped(1)
            stale = backlog.discard_stale(learner)
            discarded += len(stale)
            window.dropped(len(stale))
        # As in the loop: a batch may be formed while the last version is on its way, which ends before the optimizer.
        if (fleet == learner or max_lag) and (batch := backlog.take(learner)) is not None:
            assert max(lag_counts(batch, learner)) <= max_lag
            window.released(size if fleet < learner else 0)
            fleet = learner
            trained += [each.index for each in batch]
            learner += 1
    assert len(trained) == len(set(trained)) == steps * size
    assert issued == len(trained) + dropped + discarded + len(flying), "nothing is issued that training does not need"
    assert policy == "drop" or not (discarded or flying)
    assert policy != "wait" or trained == sorted(trained)


def test_the_learning_rate_ramps_up_and_decays_to_its_floor():
    rates = [learning_rate(step, 150, 2e-4, 15, 0.2) for step in range(150)]
    assert rates[0] == pytest.approx(2e-4 / 15)
    assert max(rates) == pytest.approx(2e-4 * (1 - 14 / 150))
    assert rates[-1] == pytest.approx(2e-4 * 0.2)
    assert learning_rate(0, 10, 1.0, 0, 0.0) == 1.0


def test_the_run_file_offers_exactly_the_estimators_and_policies_that_exist():
    assert get_args(config.Algorithm) == (*ALGORITHMS, "reinforce_pp", "gae")
    assert config.Staleness == Staleness


def test_unknown_rewards_are_left_out_of_the_batch_and_of_the_baseline():
    request, advantages = training_batch(7, "run", [group(0, (1.0, None, 0.0))], RlConfig())
    (sent,) = request.groups
    assert (request.op_id, request.model_id) == (7, "run")
    assert [completion.advantage for completion in sent.completions] == pytest.approx([0.707106, -0.707106], abs=1e-5)
    assert advantages[0][1] == 0
    assert np.isclose(advantages[0].sum(), 0)


def test_without_groups_a_step_is_compared_as_one_and_equal_rewards_teach():
    groups = [group(0, (1.0, 1.0)), group(1, (0.0, None)), group(2, (None, None))]
    assert [closing_without_groups(each) for each in groups] == [None, None, "unknown"]
    request, advantages = training_batch(7, "run", groups[:2], RlConfig(algorithm="reinforce_pp"))
    tokens = len(groups[0].samples[0].token_ids)
    returns = np.repeat([1.0, 1.0, 0.0], tokens)
    expected = (np.array([1.0, 1.0, 0.0]) - returns.mean()) / returns.std(ddof=1)
    assert np.concatenate(advantages) == pytest.approx([*expected, 0.0], abs=1e-6)
    assert [len(sent.completions) for sent in request.groups] == [2, 1]


REFERENCE = [[np.array([-1.5, -1.0, -1.25]), np.array([-1.0, -1.0, -0.5])]]
"""lp_ref of the two answers of `group`, whose sampler's log-probs are -1: sums of k1 are 0.75 and -0.5."""


def test_a_kl_in_the_reward_lowers_what_answers_are_compared_by():
    asked = RlConfig(algorithm="dr_grpo", kl_coefficient=0.4, kl_in="reward")
    request, advantages = training_batch(7, "run", [three_tokens((1.0, 0.0))], asked, REFERENCE)
    rewards = np.array([1.0 - 0.4 * 0.75, 0.0 + 0.4 * 0.5])
    assert advantages[0] == pytest.approx(rewards - rewards.mean())
    assert [each.advantage for each in request.groups[0].completions] == pytest.approx(advantages[0])
    assert request.loss.kl_coefficient == 0
    assert list(request.groups[0].completions[0].reference_logprobs) == [-1.5, -1.0, -1.25], "for the figure"


def test_without_groups_every_token_has_the_whitened_return_behind_it():
    asked = RlConfig(algorithm="reinforce_pp", kl_coefficient=0.4, kl_in="reward")
    request, advantages = training_batch(7, "run", [three_tokens((1.0, 0.0))], asked, REFERENCE)
    # -0.4 * k1 per token: -0.2, 0, -0.1 and 0, 0, 0.2, with the reward at the last one.
    returns = np.array([0.7, 0.9, 0.9, 0.2, 0.2, 0.2])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    sent = [value for completion in request.groups[0].completions for value in completion.advantages]
    assert sent == pytest.approx(expected, abs=1e-6)
    assert advantages[0] == pytest.approx(expected[[0, 3]], abs=1e-6)


def test_a_kl_in_the_reward_leaves_answers_without_a_reward_out():
    asked, reference = RlConfig(algorithm="dr_grpo", kl_coefficient=0.4, kl_in="reward"), [[*REFERENCE[0], np.zeros(0)]]
    request, advantages = training_batch(7, "run", [three_tokens((1.0, 0.0, None))], asked, reference)
    assert advantages[0] == pytest.approx([0.25, -0.25, 0.0])
    assert [list(each.reference_logprobs) for each in request.groups[0].completions] == [
        [-1.5, -1.0, -1.25],
        [-1.0, -1.0, -0.5],
    ]


def three_tokens(rewards):
    one = group(0, rewards)
    return replace(one, samples=[replace(each, token_ids=[5, 6, 7], logprobs=[-1.0] * 3) for each in one.samples])


def test_the_aggregation_follows_the_method():
    found = {
        (algorithm, loss): loss_config(RlConfig(algorithm=algorithm, loss=loss, max_tokens=7))
        for algorithm in ("grpo", "dr_grpo")
        for loss in ("ppo", "gspo")
    }
    assert found["grpo", "ppo"].aggregation == "token_mean"
    assert (found["dr_grpo", "ppo"].aggregation, found["dr_grpo", "ppo"].constant_length) == ("constant", 7)
    assert found["grpo", "gspo"].aggregation == found["dr_grpo", "gspo"].aggregation == "sequence_mean"


def test_a_run_may_truncate_importance_weights_and_pass_in_gspo_token():
    assert loss_config(RlConfig(tis_cap=2.0)).tis_cap == 2.0
    assert loss_config(RlConfig(loss="gspo_token")).aggregation == "sequence_mean"


def test_a_critic_gives_each_token_an_advantage_and_is_told_the_return():
    rewards = (1.0, 0.0, None)
    asked = group(0, rewards)
    samples = [replace(sample, token_ids=[5, 6], logprobs=[-1.0, -1.0]) for sample in asked.samples]
    groups = [replace(asked, samples=samples)]
    values = [[np.array([0.2, 0.6]), np.array([0.1, 0.3]), np.zeros(0)]]
    config = RlConfig(algorithm="gae", gae_lambda=0.5, gamma=1.0)
    request, advantages = training_batch(1, "run", groups, config, values=values)
    # delta = (0.4, 0.4) and (0.2, -0.3); A_1 = delta_1 + 0.5 delta_2
    raw = np.array([0.6, 0.4, 0.05, -0.3])
    whitened = (raw - raw.mean()) / raw.std(ddof=1)
    completions = request.groups[0].completions
    assert len(completions) == 2
    assert [x for each in completions for x in each.advantages] == pytest.approx(whitened, abs=1e-6)
    assert [x for each in completions for x in each.returns] == pytest.approx([0.8, 1.0, 0.15, 0.0], abs=1e-6)
    assert [x for each in completions for x in each.values] == pytest.approx([0.2, 0.6, 0.1, 0.3])
    assert advantages[0] == pytest.approx([whitened[0], whitened[2], 0.0])
    assert (request.loss.value_coefficient, request.loss.value_clip) == (0.1, 0.2)
    assert loss_config(RlConfig()).value_coefficient == 0.0


def test_a_run_may_hold_its_policy_near_the_one_that_it_began_with():
    loss = loss_config(RlConfig(kl_coefficient=0.04, kl_estimator="k2"))
    assert (loss.kl_coefficient, loss.kl_estimator, loss.own_reference) == (0.04, "k2", True)
    assert not loss_config(RlConfig()).own_reference


def test_answers_that_are_nearly_too_long_lose_reward_and_unknown_ones_stay_unknown():
    one = group(0, (1.0, 1.0, None))
    lengths = (2, 8, 8)
    samples = [replace(sample, token_ids=[5] * n) for sample, n in zip(one.samples, lengths, strict=True)]
    shaped = RlConfig(algorithm="dr_grpo", max_tokens=8, overlong_buffer=4, overlong_penalty=0.5)
    asked = replace(one, samples=samples)
    assert advantages_of([asked], shaped)[0] == pytest.approx([0.25, -0.25, 0.0])
    assert not advantages_of([asked], RlConfig(algorithm="dr_grpo", max_tokens=8))[0].any()


def test_the_largest_batch_that_a_run_file_may_ask_for_fits_its_bound():
    tokens = [1_900_000] * 12
    samples = [Sample(tokens, [-1.0] * 12, "stop", [Span(0, 0, 12)]) for _ in range(8)]
    asked = replace(group(0), token_ids=[1_900_000] * 64, samples=samples, grades=[Grade("scored", 1.0)] * 8)
    config = RunConfig(rl=RlConfig(groups_per_step=40))
    request, _ = training_batch(1, "run", [asked] * 40, config.rl)
    assert request.ByteSize() <= derive(config, 64).largest_batch_bytes
    shaped = {"algorithm": "reinforce_pp", "kl_coefficient": 0.1, "kl_in": "reward"}
    config = RunConfig(rl=RlConfig(groups_per_step=40, **shaped))
    request, _ = training_batch(1, "run", [asked] * 40, config.rl, [[np.full(12, -1.0)] * 8] * 40)
    assert request.ByteSize() <= derive(config, 64).largest_batch_bytes


def test_an_unknown_grade_is_not_a_reward_of_zero():
    unknown = Grade("infra_error", 0.0)
    assert set_figures("held", [unknown, unknown]) == {"eval/held/prompts": 0.0, "eval/held/unknown": 2.0}
    figures = set_figures("held", [Grade("scored", 1.0), Grade("invalid", 0.0), unknown])
    assert (figures["eval/held/reward"], figures["eval/held/valid"]) == (0.5, 0.5)
    assert figures["eval/held/exact_low"] < 0.5 < figures["eval/held/exact_high"] <= 1.0
    assert figures["eval/held/reward_low"] < 0.5 < figures["eval/held/reward_high"]


def test_a_single_grade_has_no_interval_of_its_mean():
    figures = set_figures("held", [Grade("scored", 1.0)])
    assert "eval/held/reward_low" not in figures
    assert figures["eval/held/exact_low"] == pytest.approx(0.2065, abs=1e-4)


def test_sampling_seeds_depend_on_run_and_prompt_only():
    assert sampling_seed(3, 14) == sampling_seed(3, 14)
    assert len({sampling_seed(run, index) for run in range(5) for index in range(50)}) == 250
    assert 0 <= sampling_seed(2**61, 2**40) < 2**63


def test_a_run_can_only_take_the_ways_of_its_state_machine():
    record = RunRecord("r", RunConfig())
    running = record.to("WARMING_UP").to("RUNNING")
    done = running.to("SUCCEEDED", now=5.0)
    assert (done.ended, done.ended_at) == (True, 5.0)
    assert running.to("FAILED", message="x").to("PENDING").message == ""
    for state in STATES:
        with pytest.raises(WrongState):
            done.to(state)
    for state in ENDED - {"FAILED", "CANCELLED"}:
        with pytest.raises(WrongState):
            record.to(state)
    assert RunRecord.from_bytes(done.to_bytes()) == done


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_watchdog_names_phase_party_and_age():
    clock = Clock()
    waits = Waits(clock)
    waits.check(10)
    clock.now = 4.0
    with waits.on("sync", "the replicas"):
        clock.now = 11.0
        with pytest.raises(NoProgress, match=r"no progress for 11 s .*sync: waiting for the replicas since 7 s"):
            waits.check(10)
    clock.now = 20.0
    waits.check(10)
    assert waits.drain_spent() == {"sync": 7.0}
    assert waits.drain_spent() == {}


def test_a_pause_is_no_standstill():
    clock = Clock()
    waits = Waits(clock)
    with waits.on("paused", "ResumeRun", exempt=True):
        clock.now = 1000.0
        waits.check(10)
    waits.check(10)


async def nothing(_names):
    pass


async def test_workers_that_never_come_back_are_forgotten():
    beats, forgotten = {"dead": 1, "alive": 1}, []

    async def read():
        return dict(beats)

    async def forget(names):
        forgotten.extend(names)

    watch = WorkerWatch(read, forget, Waits(), rounds=3)
    for _ in range(WORKER_FORGOTTEN_ROUNDS + 1):
        beats["alive"] += 1
        await watch.check()
    assert forgotten == ["dead"]


async def test_workers_that_are_gone_are_told_from_a_redis_that_is_away():
    beats = {"w0": 1}

    async def read():
        return dict(beats)

    waits = Waits()
    watch = WorkerWatch(read, nothing, waits, rounds=3)
    for _ in range(9):
        await watch.check()  # nobody waits for rollouts: silence is fine
    with waits.on("wait_rollout", "workers"):
        await watch.check()
        beats["w0"] += 1
        await watch.check()
        await watch.check()
        await watch.check()
        with pytest.raises(WorkersGone, match=r"none of 1 .*; wait_rollout: waiting for workers since \d+ s"):
            await watch.check()
