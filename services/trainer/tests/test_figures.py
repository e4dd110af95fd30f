"""Figures of a step: pass@k, the age of a batch, what the trainer waited for."""

import itertools

import pytest

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer.consume import Batch, verify_share
from reflux_trainer.figures import StepTimes, step_figures
from reflux_trainer.milestones import Milestones
from reflux_trainer.queue.records import Grade, Group, Sample, Span


def group(index=0, rewards=(0.0, 1.0)):
    grades = [Grade("timeout", 0.0) if reward is None else Grade("scored", reward) for reward in rewards]
    samples = [Sample([5, 6, 7], [-1.0] * 3, "stop", [Span(0, 0, 3)]) for _ in rewards]
    return Group(index, 0, [1, 2], samples, grades, 10.0, 11.0, 2.0, 4.0, 17.5, "w")


def figures(batch, spent=None):
    times = StepTimes(step=10.0, spent=spent or {}, compute=4.0, at=20.0)
    return step_figures(
        batch, 0, pb.ForwardBackwardResponse(tokens=8), pb.OptimStepResponse(), times, sync=None, depths=(0, 0)
    )


@pytest.mark.parametrize("solved", range(5))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(solved):
    rewards = [1.0] * solved + [0.5] * (4 - solved)
    found = figures(Batch([group(0, rewards)], [], 0))
    for k in (2, 4):
        choices = list(itertools.combinations(rewards, k))
        assert found[f"reward/pass_at_{k}"] == pytest.approx(sum(1.0 in some for some in choices) / len(choices))
    assert "reward/pass_at_8" not in found


def test_unknown_rewards_do_not_count_as_wrong_answers():
    found = figures(Batch([group(0, (None, 1.0, None, 0.0)), group(1, (1.0, None, None, None))], [], 0))
    assert found["reward/pass_at_2"] == 1.0
    assert "reward/pass_at_4" not in found


def test_the_age_of_a_batch_is_the_sum_of_its_parts():
    found = figures(Batch([group()], [], 0))
    assert found["age_at_train"] == 10.0
    assert [found[f"age/{part}"] for part in ("queue", "generate", "verify", "train")] == [1.0, 2.0, 4.5, 2.5]


@pytest.mark.parametrize(
    ("began", "ended", "seconds"), [(12.0, 18.0, 4.5), (14.0, 16.0, 2.0), (10.0, 12.5, 0.0), (17.6, 19.0, 0.0)]
)
def test_a_wait_is_verification_from_the_last_token_to_the_verdict(began, ended, seconds):
    assert verify_share(began, ended, group()) == pytest.approx(seconds)


def test_idle_time_has_a_cause_and_discarded_tokens_are_counted():
    batch = Batch([group()], [(group(1), "stale"), (group(2), "filtered")], 0, 20.0, verify_wait_seconds=3.0)
    found = figures(batch, {"wait_rollout": 5.0, "sync": 1.0, "checkpoint": 0.5})
    causes = {cause: found[f"trainer_idle/{cause}"] for cause in ("rollout", "verify", "sync", "checkpoint")}
    assert causes == pytest.approx({"rollout": 0.2, "verify": 0.3, "sync": 0.1, "checkpoint": 0.05})
    assert (found["tokens/discarded"], found["tokens/generated"]) == (6, 18)
    assert found["tokens_per_compute_second"] == 2.0
    assert (found["groups/stale"], found["groups/filtered"]) == (1, 1)


def test_the_parts_of_the_time_to_the_first_batch_sum_up():
    times = iter([100.0, 101.0, 103.0, 103.5, 110.0])
    milestones = Milestones(lambda: next(times))
    milestones.mark("prepare")
    assert milestones.figures() == {}
    milestones.mark("place")
    milestones.mark("place")
    milestones.mark("rollout")
    milestones.mark("rollout")
    assert milestones.figures() == {
        "first_batch": 3.5,
        "first_batch/prepare": 1.0,
        "first_batch/place": 2.0,
        "first_batch/rollout": 0.5,
    }
