"""Jobs in a real Valkey: every change is atomic, every job ends once."""

import asyncio
import uuid

import pytest

from reflux_kit.errors import CapacityExhausted, InvalidRequest, NotFound
from reflux_kit.redis import open_redis
from reflux_sandbox.jobs import Grade, JobSpec, unknown
from reflux_sandbox.store import StoreLimits, VerificationStore

SCORED = (Grade(outcome="scored", reward=1.0, figures={"r": 0.5}, message="m"),)


def limits(**changes):
    values = {"most_queued": 4, "lease_seconds": 5.0, "most_attempts": 2, "keep_seconds": 60, "cache_seconds": 60}
    return StoreLimits(**(values | changes))


@pytest.fixture
def store(redis_client, prefix):
    return VerificationStore(redis_client, "box", limits(), prefix)


def spec(answer="a", **changes):
    fields = {
        "verifier": "test/length",
        "version": "1",
        "fidelity": "rule",
        "payload": "{}",
        "answers": (answer,),
        "deadline_seconds": 60.0,
        "run": "run",
        "traceparent": "",
    }
    return JobSpec(**(fields | changes))


async def create(store, job_spec, request_id=""):
    how, job = await store.create(job_spec, request_id or uuid.uuid4().hex)
    return how, job.job_id


async def claim_one(store):
    (job,) = (await store.claim("rule", "", 1)).jobs
    return job


async def test_a_job_goes_from_queued_over_running_to_ended(store):
    how, job_id = await create(store, spec())
    assert how == "queued"
    assert (await store.get(job_id)).state == "queued"
    claimed = await claim_one(store)
    assert (claimed.job_id, claimed.answers, claimed.attempt) == (job_id, ("a",), 1)
    assert 50 < claimed.seconds_left <= 60
    assert (await store.get(job_id)).state == "running"
    assert await store.finish(job_id, SCORED)
    job = await store.get(job_id)
    assert (job.state, job.grades, job.attempts, job.cached) == ("ended", SCORED, 1, False)


async def test_a_repeated_request_id_gets_the_first_job(store):
    first = await create(store, spec("a"), "same")
    again = await create(store, spec("b"), "same")
    assert again == ("known", first[1])
    assert (await store.depths())["rule"] == 1


async def test_a_request_id_whose_job_is_kept_no_longer_makes_a_new_one(store, redis_client, prefix):
    _, first = await create(store, spec(), "old")
    await store.cancel(first)
    await redis_client.delete(f"{prefix}job:{first}")
    how, second = await create(store, spec(), "old")
    assert how == "queued"
    assert second != first


async def test_equal_work_is_done_once_and_then_comes_from_the_cache(store):
    _, leader = await create(store, spec())
    how, follower = await create(store, spec(run="other"))
    assert how == "joined"
    await claim_one(store)
    assert (await store.claim("rule", "", 9)).jobs == ()
    await store.finish(leader, SCORED)
    joined = await store.get(follower)
    assert (joined.state, joined.grades, joined.cached, joined.run) == ("ended", SCORED, True, "other")
    how, third = await create(store, spec())
    assert how == "cached"
    assert (await store.get(third)).cached


async def test_another_version_is_other_work(store):
    _, first = await create(store, spec())
    await claim_one(store)
    await store.finish(first, SCORED)
    assert (await create(store, spec(version="2")))[0] == "queued"


async def test_an_unknown_result_is_not_cached_and_the_follower_takes_over(store):
    _, leader = await create(store, spec())
    followers = [(await create(store, spec()))[1] for _ in range(2)]
    await claim_one(store)
    await store.finish(leader, unknown("timeout", 1, "late"), "late")
    assert (await store.get(leader)).grades[0].outcome == "timeout"
    heir = await claim_one(store)
    assert heir.job_id == followers[0]
    await store.finish(heir.job_id, SCORED)
    assert (await store.get(followers[1])).grades == SCORED


async def test_a_full_queue_refuses_and_names_the_fidelity(store):
    for number in range(4):
        await create(store, spec(str(number)))
    with pytest.raises(CapacityExhausted, match="rule"):
        await create(store, spec("one more"))
    assert (await create(store, spec("x", fidelity="full")))[0] == "queued"


async def test_only_jobs_of_one_verifier_are_claimed_together_in_order(store):
    ids = [(await create(store, spec(str(n), verifier=v)))[1] for n, v in enumerate(["t/a", "t/a", "t/b", "t/a"])]
    claim = await store.claim("rule", "", 9)
    assert ([job.job_id for job in claim.jobs], claim.head) == (ids[:2], "t/b")
    assert await store.claim("rule", "t/a", 9) == type(claim)("t/b", ())
    assert [job.job_id for job in (await store.claim("rule", "", 9)).jobs] == ids[2:3]


async def test_a_result_after_the_lease_was_lost_changes_nothing(store, redis_client, prefix):
    _, job_id = await create(store, spec())
    await claim_one(store)
    successor = VerificationStore(redis_client, "box", limits(), prefix)
    assert await successor.sweep() == (1, 0)
    assert (await claim_one(successor)).attempt == 2
    assert await store.heartbeat([job_id]) == {job_id}
    assert not await store.finish(job_id, SCORED)
    assert await successor.finish(job_id, unknown("timeout", 1, "late"))
    assert (await store.get(job_id)).grades[0].outcome == "timeout"


async def test_a_repeated_finish_is_the_same_finish(store):
    _, job_id = await create(store, spec())
    await claim_one(store)
    assert await store.finish(job_id, SCORED)
    assert await store.finish(job_id, SCORED)
    position = await store.position("run", "")
    assert position != "0-0"


async def test_another_service_waits_for_the_lease_to_end(redis_client, prefix):
    first = VerificationStore(redis_client, "box-1", limits(lease_seconds=0.2), prefix)
    second = VerificationStore(redis_client, "box-2", limits(), prefix)
    _, job_id = await create(first, spec())
    await claim_one(first)
    assert await second.sweep() == (0, 0)
    await _until_swept(second)
    assert (await claim_one(second)).job_id == job_id


async def _until_swept(store):
    for _ in range(500):
        if (await store.sweep())[0]:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the lease did not end")


async def test_attempts_are_bounded_and_end_as_infra_error(store):
    _, job_id = await create(store, spec())
    await claim_one(store)
    assert await store.release(job_id, "boom", counted=True) == "queued"
    await claim_one(store)
    assert await store.release(job_id, "boom", counted=True) == "ended"
    job = await store.get(job_id)
    assert (job.grades[0].outcome, job.attempts) == ("infra_error", 2)
    assert "boom (attempt 2 of 2)" in job.error


async def test_a_neighbours_failure_costs_no_attempt_and_no_place_in_the_queue(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(3)]
    jobs = (await store.claim("rule", "", 2)).jobs
    for job in reversed(jobs):
        await store.release(job.job_id, "neighbour", counted=False)
    again = (await store.claim("rule", "", 9)).jobs
    assert [job.job_id for job in again] == ids
    assert {job.attempt for job in again} == {1}


async def test_cancelled_jobs_end_in_every_state(store):
    _, queued = await create(store, spec("a"))
    assert not await store.cancel(queued)
    assert (await store.get(queued)).grades[0].outcome == "cancelled"
    assert (await store.claim("rule", "", 1)).jobs == ()
    _, running = await create(store, spec("b"))
    await claim_one(store)
    assert await store.cancel(running)
    assert not await store.finish(running, SCORED)
    assert (await store.get(running)).grades[0].outcome == "cancelled"
    assert not await store.cancel(running)
    with pytest.raises(NotFound):
        await store.cancel("0" * 32)


async def test_a_cancelled_follower_leaves_the_leader_alone(store):
    _, leader = await create(store, spec())
    _, follower = await create(store, spec())
    await store.cancel(follower)
    await claim_one(store)
    await store.finish(leader, SCORED)
    assert (await store.get(follower)).grades[0].outcome == "cancelled"


async def test_a_deadline_that_passes_in_the_queue_is_a_timeout(store):
    _, job_id = await create(store, spec(deadline_seconds=0.001))
    _, follower = await create(store, spec(deadline_seconds=60.0))
    await asyncio.sleep(0.01)
    assert await store.sweep() == (0, 1)
    assert (await store.get(job_id)).grades[0].outcome == "timeout"
    assert (await claim_one(store)).job_id == follower


async def test_a_watcher_sees_each_ended_job_once_and_can_resume(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(3)]
    start = await store.position("run", "")
    for job in (await store.claim("rule", "", 3)).jobs:
        await store.finish(job.job_id, SCORED)
    stream = store.ended_jobs("run", start)
    first, token = await anext(stream)
    rest = store.ended_jobs("run", token)
    seen = [first.job_id, *[(await anext(rest))[0].job_id for _ in range(2)]]
    assert seen == ids
    assert await store.position("run", token) == token
    with pytest.raises(InvalidRequest):
        await store.position("run", "yesterday")


async def test_watchers_do_not_take_connections_from_the_work(valkey_url, prefix):
    async with (
        open_redis(valkey_url, max_connections=1, wait_seconds=0.1) as client,
        open_redis(valkey_url, max_connections=1) as watching,
    ):
        store = VerificationStore(client, "box", limits(), prefix, watching=watching)
        watcher = asyncio.create_task(anext(store.ended_jobs("run", "0-0")))
        await asyncio.sleep(0)
        _, job_id = await create(store, spec())
        await claim_one(store)
        await store.finish(job_id, SCORED)
        assert (await asyncio.wait_for(watcher, 20))[0].job_id == job_id


async def test_unknown_grades_of_a_group_have_one_row_per_answer(store):
    _, job_id = await create(store, spec(answers=("a", "b", "c")))
    await store.cancel(job_id)
    assert (await store.get(job_id)).grades == unknown("cancelled", 3, "cancelled on request")


async def test_ended_jobs_hold_no_payload_and_no_queue_entry(store, redis_client, prefix):
    _, job_id = await create(store, spec(payload='{"big":"' + "x" * 10000 + '"}'))
    await claim_one(store)
    await store.finish(job_id, SCORED)
    fields = await redis_client.hkeys(f"{prefix}job:{job_id}")
    assert b"payload" not in fields
    keys = {key.decode().removeprefix(prefix).split(":")[0] async for key in redis_client.scan_iter(f"{prefix}*")}
    assert keys == {"job", "cache", "request", "ended"}
