"""Ladders on a real job store: what is told survives a death at any point, once."""

import asyncio
import dataclasses
import random
import time
import uuid
from collections import Counter

import pytest
from ladder_world import World, kinds, parsed

from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit.errors import NotFound
from reflux_sandbox.ladder.calibration import Record
from reflux_sandbox.ladder.ladders import Ladders
from reflux_sandbox.ladder.state import LadderState
from reflux_sandbox.ladder.store import Commit
from reflux_sandbox.leases import stop_tasks

ALL = {"value_of_information": False}


def by_length(fidelity, answer):
    """rule passes all, the surrogate says 0.1 per character, the full verifier 0.2."""
    return {"rule": 1.0, "surrogate": 0.1, "full": 0.2}[fidelity] * len(answer)


@pytest.fixture
def run():
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def world(redis_client, prefix):
    return World(redis_client, prefix, by_length)


async def trust(world, run):
    """Gives the run a past in which the surrogate was right."""
    spec = await parsed(world, run, "past")
    await world.ladders_store.create(spec)
    records = [Record(cheap=n / 100, lead=0.0, full=n / 50, cpu_seconds=1.5) for n in range(100)]
    stored = await world.ladders_store.load(spec.ladder_id)
    step = Commit(state=LadderState(settled=True), records=records, counts={}, trusted=True)
    assert await world.ladders_store.commit(stored, step)
    await world.ladders_store.close(spec.ladder_id)


async def test_a_run_waits_for_full_until_calibration_trusts_the_surrogate(world, run):
    world.grader = lambda fidelity, answer: by_length(fidelity, answer) / 10
    async with world.graders(), world.ladders() as ladders:
        for number in range(4):
            answers = tuple("x" * size for size in range(1 + number, 5 + number))
            await ladders.create(await parsed(world, run, str(number), answers, trust_least_pairs=8, **ALL))
            events = await world.until(run, "settlement", number + 1)
    rungs = [event.release.fidelity for event in events if event.WhichOneof("event") == "release"]
    assert rungs[:2] == [Verification.FIDELITY_FULL] * 2
    assert rungs[-1] == Verification.FIDELITY_SURROGATE
    state = await world.ladders_store.run(run)
    assert state.trusted
    assert (state.counters["groups_settled"], state.counters["verifications_measured"]) == (4, 16)


async def test_a_released_group_is_corrected_answer_by_answer_and_equal_answers_run_once(world, run):
    await trust(world, run)
    async with world.graders(), world.ladders() as ladders:
        await ladders.create(await parsed(world, run, **ALL))
        events = await world.until(run, "settlement")
    assert kinds(events) == ["release", "correction", "correction", "correction", "settlement"]
    found = {e.correction.sample_id: e.correction for e in events if e.WhichOneof("event") == "correction"}
    assert found["7/1"].provisional_reward == pytest.approx(0.2)
    assert found["7/2"].final_reward == pytest.approx(0.4)
    assert found["7/1"].verification == found["7/2"].verification != found["7/0"].verification
    assert [row.reward for row in events[-1].settlement.samples] == pytest.approx([0.2, 0.4, 0.4])
    assert events[0].policy_version == 3
    assert Counter(fidelity for fidelity, _ in world.graded) == {"rule": 2, "surrogate": 2, "full": 2}


async def test_the_same_request_makes_one_ladder(world, run):
    spec = await parsed(world, run, **ALL)
    async with world.graders(), world.ladders() as ladders:
        await ladders.create(spec)
        await world.until(run, "settlement")
        again = await ladders.create(spec)
        assert again.state.settled
        assert kinds(await world.events(run)).count("release") == 1


async def test_a_verification_without_a_verdict_is_told_and_corrects_nothing(world, run):
    await trust(world, run)
    world.grader = lambda fidelity, answer: (
        "timeout" if (fidelity, answer) == ("full", "bb") else by_length(fidelity, answer)
    )
    async with world.graders(), world.ladders() as ladders:
        await ladders.create(await parsed(world, run, **ALL))
        events = await world.until(run, "settlement")
    assert sorted(kinds(events)) == ["correction", "release", "settlement", "unresolved", "unresolved"]
    last = events[-1].settlement.samples[1]
    assert not last.HasField("reward")


async def test_what_is_certain_never_runs_and_saves_its_cost(world, run):
    await trust(world, run)
    async with world.graders(), world.ladders() as ladders:
        await ladders.create(await parsed(world, run, audit_share=1e-9))
        events = await world.until(run, "settlement")
        state = await ladders.runs.get(run)
    assert kinds(events) == ["release", "settlement"]
    assert "full" not in {fidelity for fidelity, _ in world.graded}
    assert state.row.counters["cpu_seconds_saved"] == pytest.approx(3.0)
    assert [row.reward for row in events[-1].settlement.samples] == pytest.approx([0.2, 0.4, 0.4], abs=0.05)


async def test_cancelling_settles_and_takes_the_jobs_out_of_the_queue(world, run):
    await trust(world, run)
    world.paused = {"full"}
    async with world.graders(), world.ladders() as ladders:
        for group, version in (("1", 3), ("2", 9)):
            await ladders.create(await parsed(world, run, group, policy_version=version, **ALL))
        await world.until(run, "release", 2)
        assert await ladders.cancel_run(run, 5) == 1
        events = await world.until(run, "settlement")
        assert {event.group for event in events if event.WhichOneof("event") == "settlement"} == {"1"}
        async with asyncio.timeout(30):
            while (await world.store.depths())["full"] > 2:
                await asyncio.sleep(0.01)
        world.paused = set()
        await world.until(run, "settlement", 2)
    assert Counter(fidelity for fidelity, _ in world.graded)["full"] == 2


async def test_a_cancellation_that_another_step_overtakes_is_tried_again(world, run, monkeypatch):
    commit, refusals = world.ladders_store.commit, iter([False])

    async def overtaken(stored, step):
        return next(refusals, True) and await commit(stored, step)

    spec = await parsed(world, run, **ALL)
    await world.ladders_store.create(spec)
    monkeypatch.setattr(world.ladders_store, "commit", overtaken)
    ladders = Ladders(world.ladders_store, world.door, None)
    assert await ladders.cancel(spec.ladder_id)
    assert (await world.ladders_store.load(spec.ladder_id)).state.settled
    assert not await ladders.cancel(spec.ladder_id)


async def test_a_ladder_whose_next_job_is_refused_waits_and_then_settles_without_it(world, run, monkeypatch):
    def refuse(request):
        asked.set()
        raise NotFound("there is no verifier any more")

    asked = asyncio.Event()
    spec = await parsed(world, run, **ALL)
    monkeypatch.setattr(world.door, "parse", refuse)
    async with asyncio.timeout(30), world.ladders() as ladders:
        await ladders.create(dataclasses.replace(spec, ladder_id="a" * 32))
        await asked.wait()
        await ladders.create(dataclasses.replace(spec, ladder_id="b" * 32, created=time.time() - 4 * 3600))
        (event,) = await world.until(run, "settlement")
    assert event.ladder.endswith("b" * 32)
    assert {row.skipped for row in event.settlement.samples} == {"cancelled"}


async def test_stale_groups_are_given_up_when_a_newer_version_is_seen(world, run):
    await trust(world, run)
    world.grader = lambda fidelity, answer: random.Random(answer).random()
    world.paused = {"full"}
    policy = {"max_lag": 2, "audit_share": 1e-9, "tolerated_error": 0.0}
    async with world.graders(), world.ladders() as ladders:
        await ladders.create(await parsed(world, run, "1", ("a", "b", "c"), **policy))
        await world.until(run, "release")
        await ladders.create(await parsed(world, run, "2", ("a", "b", "c"), policy_version=6, **policy))
        events = await world.until(run, "settlement")
    (settled,) = [event for event in events if event.WhichOneof("event") == "settlement"]
    assert (settled.group, {row.skipped for row in settled.settlement.samples}) == ("1", {"stale"})


@pytest.mark.parametrize("seed", [0, 1])
async def test_death_at_any_call_to_redis_neither_loses_nor_doubles_an_event(world, run, seed, monkeypatch):
    await deaths(world, run, seed, 3, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 40))
async def test_more_deaths(world, run, seed, monkeypatch):
    await deaths(world, run, seed, 12, monkeypatch)


async def deaths(world, run, seed, groups, monkeypatch):
    """Every service dies after a few store calls, before or after the call took effect, until all is settled."""
    await trust(world, run)
    dice = random.Random(seed)
    left = 0

    def mortal(method):
        async def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0 and dice.random() < 0.5:
                dead.set()
                await asyncio.Event().wait()  # died before it was done
            result = await method(*args, **kwargs)
            if left < 0:
                dead.set()
                await asyncio.Event().wait()  # done, and nobody heard
            return result

        return call

    for target, name in (
        (world.ladders_store, "create"),
        (world.ladders_store, "commit"),
        (world.ladders_store, "close"),
        (world.door, "create"),
        (world.door, "cancel"),
    ):
        monkeypatch.setattr(target, name, mortal(getattr(target, name)))
    specs = [
        await parsed(world, run, str(number), ("a", "bb", "bb", "x" * (number + 3)), **ALL) for number in range(groups)
    ]
    async with world.graders(), asyncio.timeout(120):
        settled = 0
        while settled < groups:
            left, dead = dice.randrange(6, 30), asyncio.Event()
            async with world.ladders() as ladders:
                creating = {asyncio.create_task(ladders.create(spec)) for spec in specs}
                while settled < groups and not dead.is_set():
                    await asyncio.sleep(0.005)
                    settled = kinds(await world.events(run)).count("settlement")
                await stop_tasks(creating)
    events = await world.events(run)
    told = Counter((e.group, e.WhichOneof("event"), e.correction.sample_id) for e in events)
    assert set(told.values()) == {1}
    assert Counter(kinds(events)) == {"release": groups, "correction": 4 * groups, "settlement": groups}
    full = Counter(answer for fidelity, answer in world.graded if fidelity == "full")
    assert full.total() == 3 * groups  # each different answer of each problem ran once
