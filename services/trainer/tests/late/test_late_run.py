"""A run that is trained on its surrogate: released at once, corrected later, each group once."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from trainer_world import config, create, events_of, finish, short

from reflux.trainer.v1 import run_pb2
from reflux_runs.config import RlConfig
from reflux_trainer.advantages import advantages_of
from reflux_trainer.consume import Batch
from reflux_trainer.late.rewards import Corrections
from reflux_trainer.late.store import LateStore, Trained
from reflux_trainer.queue.ledger import Cursor
from reflux_trainer.queue.records import Grade, Group, Sample, Span

LATE = {"release": "surrogate", "verifier": "full", "steps": 6}


async def test_late_rewards_become_correction_samples_of_later_steps(late_world):
    async with late_world.trainer() as stub:
        run = await create(stub, config(rl=LATE))
        events = await finish(late_world, stub, run)
    assert events[-1].run.state == run_pb2.Run.STATE_SUCCEEDED
    batches = late_world.learner.batches
    late = [batch for batch in batches if batch.loss.tis_cap]
    assert late
    assert {batch.loss.name for batch in late} == {"reinforce"}
    answers = Counter(tuple(group.prompt_token_ids) for batch in late for group in batch.groups)
    assert answers.total() == sum(len(batch.groups) for batch in late)
    change = [each.advantage for each in late[0].groups[0].completions]
    assert change[0] == pytest.approx(-change[1])
    assert change[0] > 0  # the provisional reward said that the second one was better
    told = [{m.name: m.value for m in e.progress.metrics} for e in events if e.progress.stage == "rl"]
    assert sum(figures["late/corrected"] for figures in told) == answers.total()
    assert late_world.rungs.cancelled == [short(run)]
    asked = next(iter(late_world.rungs.ladders.values()))
    assert (asked.surrogate_verifier, asked.full_verifier) == ("counting/surrogate", "counting/full")
    assert asked.policy.max_lag == 16
    assert not asked.rule_verifier


async def test_the_run_file_says_what_groups_climb_and_what_full_verification_may_cost(late_world):
    rl = LATE | {"steps": 1, "rule": "label", "audit_share": 0.5, "tolerated_error": 0.2, "full_cpu_seconds": 60.0}
    async with late_world.trainer() as stub:
        run = await create(stub, config(rl=rl))
        events = await finish(late_world, stub, run)
    assert events[-1].run.state == run_pb2.Run.STATE_SUCCEEDED
    asked = next(iter(late_world.rungs.ladders.values()))
    assert asked.rule_verifier == "counting/label"
    assert (asked.policy.audit_share, asked.policy.tolerated_error, asked.policy.budget_cpu_seconds) == (0.5, 0.2, 60.0)


@pytest.mark.parametrize(
    ("changes", "needed"), [({"verifier": "label"}, "full"), ({"verifier": "full", "rule": "surrogate"}, "rule")]
)
async def test_a_verifier_on_the_wrong_rung_is_refused_before_the_run_starts(late_world, changes, needed):
    async with late_world.trainer() as stub:
        run = await create(stub, config(rl={"release": "surrogate"} | changes))
        events = await events_of(stub, run.name)
    assert events[-1].run.state == run_pb2.Run.STATE_FAILED
    assert f"needs one of fidelity {needed} here" in events[-1].run.message


async def test_a_worker_gets_the_release_by_asking_when_the_stream_says_nothing(late_world, monkeypatch):
    monkeypatch.setattr("reflux_trainer.clients.ladders._POLL_SECONDS", 0.05)
    late_world.rungs.silent = True
    async with late_world.trainer() as stub:
        run = await create(stub, config(rl=LATE | {"steps": 1}))
        events = await finish(late_world, stub, run)
    assert events[-1].run.state == run_pb2.Run.STATE_SUCCEEDED


def group(index, rewards=(0.0, 1.0), version=0):
    samples = [Sample([4, 1], [-0.5, -0.1], "stop", [Span(version, 0, 2)]) for _ in rewards]
    return Group(
        index=index,
        version=version,
        token_ids=[3, 2],
        samples=samples,
        grades=[Grade("scored", reward) for reward in rewards],
        issued_at=0.0,
        claimed_at=0.0,
        generate_seconds=0.0,
        verify_seconds=0.0,
        emitted_at=0.0,
        worker="w",
        provisional=True,
    )


@pytest.fixture
def store(redis_client, run_id):
    return LateStore(redis_client, run_id)


@pytest.fixture
def corrections(store, run_id):
    def make(**changes):
        return Corrections(store, None, run_id, RlConfig(**changes))

    return make


BATCH = Batch([group(7)], [], 1)


async def test_a_correction_is_planned_again_until_it_is_logged_and_never_after(store, corrections):
    await corrections().trained(3, Batch([group(0)], [], 1), [np.array([-0.7, 0.7])])
    await store.settle({0: [1.0, 0.0]}, "5-0")
    (first,) = await corrections().operations(Cursor(op_id=4), 1, BATCH)
    (again,) = await corrections().operations(Cursor(op_id=4), 1, BATCH)  # the trainer died before it logged the step
    assert first == again
    assert first.op_id == 6
    assert [each.advantage for each in first.groups[0].completions] == pytest.approx([1.4071, -1.4071], abs=1e-3)
    assert await corrections().operations(Cursor(op_id=7), 2, BATCH) == []
    assert await store.waiting() == 0
    assert await store.token() == "5-0"


async def test_a_correction_that_was_not_logged_is_not_lost_to_others_under_its_number(store, corrections):
    dead = corrections(groups_per_step=1)
    await dead.trained(3, Batch([group(5)], [], 6), [np.array([-0.7, 0.7])])
    await dead.trained(3, Batch([group(4)], [], 6), [np.array([-0.7, 0.7])])
    await store.settle({5: [1.0, 0.0]}, "1-0")
    (lost,) = await dead.operations(Cursor(op_id=10), 1, BATCH)  # and dies before it logs operations 11 to 13
    await store.settle({4: [1.0, 0.0]}, "2-0")
    alive = corrections(groups_per_step=1)
    (other,) = await alive.operations(Cursor(op_id=10), 1, BATCH)
    assert (await store.trained([5]))[5].corrected_by == 0
    (again,) = await alive.operations(Cursor(op_id=13), 2, BATCH)
    assert (lost.op_id, other.op_id, again.op_id) == (12, 12, 15)
    assert await alive.operations(Cursor(op_id=16), 3, BATCH) == []
    assert await store.waiting() == 0
    assert (await alive.figures())["late/corrected"] == 2.0


async def test_a_group_whose_training_was_not_logged_is_corrected_once_when_it_is_trained(store, corrections):
    half = np.array([-0.7, 0.7])
    filtered = [(group(1, (1.0, 1.0)), "filtered")]
    await corrections().trained(11, Batch([group(0), group(2)], filtered, 3), [half, half])  # and dies: not logged
    alive = corrections()
    assert await alive.operations(Cursor(op_id=10), 1, BATCH) == []
    await alive.trained(11, Batch([group(0), group(3)], [], 2), [half, half])  # logged with operation 12
    await store.settle({2: [1.0, 0.0]}, "1-0")
    assert await alive.operations(Cursor(op_id=12), 2, BATCH) == []
    await alive.trained(13, Batch([group(2), group(4)], [], 5), [half, half])  # logged with operation 14
    (request,) = await alive.operations(Cursor(op_id=14), 3, BATCH)
    assert len(request.groups) == 1
    assert await alive.operations(Cursor(op_id=17), 4, BATCH) == []
    assert set(await store.trained([0, 1, 2, 3, 4])) == {0, 1, 3, 4}  # the filtered one was closed before the death


async def test_late_rewards_beyond_the_bound_are_counted_and_dropped_by_name(store, corrections):
    late = corrections(correction_lag=2)
    await late.trained(1, Batch([group(0)], [], 1), [np.array([-0.7, 0.7])])
    await store.settle({0: [1.0, 0.0]}, "1-0")
    assert await late.operations(Cursor(op_id=4), 3, BATCH) == []
    figures = await late.figures()
    assert (figures["late/too_old"], figures["late/corrected"], figures["late/waiting"]) == (1.0, 0.0, 0.0)


async def test_a_group_that_its_surrogate_filtered_is_taught_by_its_final_rewards(store, corrections):
    filtered = group(0, (1.0, 1.0))
    await corrections().trained(1, Batch([group(7)], [(filtered, "filtered")], 8), [np.zeros(2)])
    await store.settle({0: [1.0, 0.0]}, "1-0")
    (request,) = await corrections().operations(Cursor(op_id=2), 1, BATCH)
    assert [each.advantage for each in request.groups[0].completions] == pytest.approx([0.7071, -0.7071], abs=1e-3)


@pytest.mark.parametrize("final", [[0.0, 1.0], [0.0, 0.5]])
async def test_a_correction_leaves_the_penalty_of_long_answers_as_it_was_trained(store, corrections, final):
    shaping = {"algorithm": "dr_grpo", "max_tokens": 4, "overlong_buffer": 4, "overlong_penalty": 0.5}
    long = Sample([4, 1, 1, 1], [-0.5] * 4, "stop", [Span(0, 0, 4)])
    one = replace(group(0), samples=[group(0).samples[0], long])
    advantages = advantages_of([one], RlConfig(**shaping))[0]
    assert advantages == pytest.approx([-0.375, 0.375])  # the penalties are 0.25 and 0.5
    await corrections(**shaping).trained(1, Batch([one], [], 1), [advantages])
    await store.settle({0: final}, "1-0")
    requests = await corrections(**shaping).operations(Cursor(op_id=2), 1, BATCH)
    change = [each.advantage for request in requests for each in request.groups[0].completions]
    lost = 1.0 - final[1]
    assert change == pytest.approx([lost / 2, -lost / 2] if lost else [])


async def test_equal_final_rewards_teach_no_length_to_a_group_that_was_filtered(store, corrections):
    shaping = {"max_tokens": 4, "overlong_buffer": 4, "overlong_penalty": 0.5}
    long = Sample([4, 1, 1, 1], [-0.5] * 4, "stop", [Span(0, 0, 4)])
    filtered = replace(group(0, (1.0, 1.0)), samples=[group(0).samples[0], long])
    await corrections(**shaping).trained(1, Batch([group(7)], [(filtered, "filtered")], 8), [np.zeros(2)])
    await store.settle({0: [0.0, 0.0]}, "1-0")
    assert await corrections(**shaping).operations(Cursor(op_id=2), 1, BATCH) == []


async def test_rewards_of_groups_that_were_never_trained_are_forgotten(store, corrections):
    await store.settle({0: [1.0, 0.0], 9: [1.0, 0.0]}, "1-0")
    assert await corrections().operations(Cursor(op_id=2, low_water_index=5), 1, BATCH) == []
    assert set(await store.settled()) == {9}  # may still be trained


async def test_what_was_trained_survives_the_store(store):
    kept = Trained(group(4), [0.5, -0.5], 11)
    await store.remember([kept])
    (found,) = (await store.trained([4, 5])).values()
    assert found == kept
    assert found.provisional.oldest_version == 0
