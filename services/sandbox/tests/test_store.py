"""Jobs in a real Valkey: every change is atomic, every job ends once."""

import asyncio
import dataclasses

import pytest
from store_jobs import SCORED, claim_one, create, late, limits, outcomes, scored, spec

from reflux_kit.errors import CapacityExhausted, InvalidRequest, NotFound, WrongState
from reflux_kit.redis import open_redis
from reflux_sandbox.external import OutsideCallers
from reflux_sandbox.jobs import Grade, JobEnd, Selector, answer_keys
from reflux_sandbox.store import VerificationStore


@pytest.fixture
def store(redis_client, prefix):
    return VerificationStore(redis_client, "box", limits(), prefix)


async def test_a_job_goes_from_queued_over_running_to_ended(store):
    how, job_id = await create(store, spec())
    assert how == "queued"
    assert (await store.get(job_id)).state == "queued"
    claimed = await claim_one(store)
    assert (claimed.job_id, claimed.answers, claimed.attempt) == (job_id, ("a",), 1)
    assert 50 < claimed.seconds_left <= 60
    assert (await store.get(job_id)).state == "running"
    assert await store.finish(scored(claimed))
    job = await store.get(job_id)
    assert (job.state, job.grades, job.attempts, job.cached) == ("ended", SCORED, 1, False)


async def test_a_job_keeps_what_its_creator_said_of_it(store):
    said = {"group": "g", "priority": 2.5, "policy_version": 7, "sample_ids": ("s1", "s2"), "cost_hint_seconds": 9.0}
    _, job_id = await create(store, spec(answers=("a", "b"), **said))
    claimed = await claim_one(store)
    await store.finish(dataclasses.replace(scored(claimed), cpu_seconds=0.25))
    job = await store.get(job_id)
    assert {name: getattr(job, name) for name in said} == said
    assert (job.cpu_seconds, job.executed, job.version, job.fidelity) == (0.25, 2, "1", "rule")


async def test_a_known_request_id_gives_the_first_job_of_its_run(store):
    first = await create(store, spec("a"), "same")
    again = await create(store, spec("b"), "same")
    assert again == ("known", first[1])
    assert (await store.depths())["rule"] == 1
    assert (await create(store, spec("a", run="other"), "same"))[1] != first[1]


async def test_a_request_id_whose_job_is_kept_no_longer_makes_a_new_one(store, redis_client, prefix):
    _, first = await create(store, spec(), "old")
    await store.cancel_job(first)
    await redis_client.delete(f"{prefix}job:{first}")
    assert await create(store, spec(), "old") == ("queued", first)
    assert (await store.get(first)).state == "queued"


async def test_eight_equal_answers_of_a_group_run_once(store):
    _, job_id = await create(store, spec(answers=("a",) * 8))
    claimed = await claim_one(store)
    assert claimed.answers == ("a",)
    await store.finish(scored(claimed))
    job = await store.get(job_id)
    assert (job.grades, job.executed) == (SCORED * 8, 1)


async def test_eight_jobs_with_equal_answers_run_once_whatever_their_run(store):
    store = VerificationStore(store._redis, "box", limits(most_queued=99), store._prefix)
    ids = [(await create(store, spec(run=f"run-{number}")))[1] for number in range(8)]
    claim = await store.claim("rule", "", 9)
    assert [job.job_id for job in claim.jobs] == ids[:1]
    await store.finish(scored(claim.jobs[0]))
    jobs = [await store.get(job_id) for job_id in ids]
    assert [job.state for job in jobs] == ["ended"] * 8
    assert [job.cached for job in jobs] == [False] + [True] * 7
    assert sum(job.attempts for job in jobs) == 1
    assert (await create(store, spec()))[0] == "cached"


async def test_groups_that_overlap_share_answers_and_run_the_rest(store):
    _, first = await create(store, spec(answers=("a", "b")))
    _, second = await create(store, spec(answers=("b", "c", "b", "a")))
    one, two = (await store.claim("rule", "", 2)).jobs
    assert (one.answers, two.answers) == (("a", "b"), ("c",))
    await store.finish(scored(two, [3.0]))
    waiting = await store.get(second)
    assert (waiting.state, {number: grade.reward for number, grade in waiting.partial.items()}) == ("queued", {1: 3.0})
    assert (await store.claim("rule", "", 2)).jobs == ()
    await store.finish(scored(one, [1.0, 2.0]))
    assert [grade.reward for grade in (await store.get(first)).grades] == [1.0, 2.0]
    assert [grade.reward for grade in (await store.get(second)).grades] == [2.0, 3.0, 2.0, 1.0]


async def test_answers_with_one_canonical_text_are_equal(store):
    _, job_id = await create(store, spec(answers=("b a", "a b", "c"), canonical=("a b", "a b", "c")))
    claimed = await claim_one(store)
    assert claimed.answers == ("b a", "c")
    await store.finish(scored(claimed, [1.0, 2.0]))
    assert [grade.reward for grade in (await store.get(job_id)).grades] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("changes", [{"version": "2"}, {"verifier": "test/apart"}, {"payload": '{"a":1}'}])
async def test_other_work_is_not_answered_from_the_cache(store, changes):
    await create(store, spec())
    await store.finish(scored(await claim_one(store)))
    assert (await create(store, spec(**changes)))[0] == "queued"


async def test_an_unknown_result_is_not_cached_and_the_next_equal_job_runs(store):
    _, leader = await create(store, spec())
    followers = [(await create(store, spec()))[1] for _ in range(2)]
    claimed = await claim_one(store)
    assert (await store.claim("rule", "", 9)).jobs == ()
    requeued = []
    store.on_requeue = lambda: requeued.append(1)
    await store.finish(late(claimed))
    assert outcomes(await store.get(leader)) == ["timeout"]
    assert requeued
    heir = await claim_one(store)
    assert heir.job_id == followers[0]
    await store.finish(scored(heir))
    assert (await store.get(followers[1])).grades == SCORED


async def test_the_graded_answers_of_a_job_whose_others_are_unknown_are_kept(store):
    _, job_id = await create(store, spec(answers=("a", "b")))
    claimed = await claim_one(store)
    await store.finish(JobEnd(job=claimed, grades=(*SCORED, Grade(outcome="infra_error", message="tool"))))
    assert outcomes(await store.get(job_id)) == ["scored", "infra_error"]
    assert (await create(store, spec("a")))[0] == "cached"
    assert (await create(store, spec("b")))[0] == "queued"


async def test_single_flight_survives_the_death_of_the_service_that_flew(store, redis_client, prefix):
    ids = [(await create(store, spec()))[1] for _ in range(3)]
    await claim_one(store)
    assert (await store.claim("rule", "", 9)).jobs == ()
    successor = VerificationStore(redis_client, "box", limits(), prefix)
    assert await successor.sweep() == (1, 0)
    claimed = (await successor.claim("rule", "", 9)).jobs
    assert len(claimed) == 1
    await successor.finish(scored(claimed[0]))
    jobs = [await store.get(job_id) for job_id in ids]
    assert [job.state for job in jobs] == ["ended"] * 3
    assert sum(job.attempts for job in jobs) == 2


async def test_a_flight_of_a_job_that_is_gone_holds_nobody_up(store, redis_client, prefix):
    _, job_id = await create(store, spec())
    await redis_client.set(f"{prefix}flight:{answer_keys(spec())[0]}", "0" * 32)
    assert (await claim_one(store)).job_id == job_id


async def test_when_an_attempt_fails_those_who_waited_for_it_may_run(store):
    _, leader = await create(store, spec(priority=-1.0))
    flying = await claim_one(store)
    _, follower = await create(store, spec(priority=5.0))
    assert (await store.claim("rule", "", 9)).jobs == ()
    assert await store.release(flying, "boom", counted=True) == "queued"
    heir = await claim_one(store)
    assert heir.job_id == follower
    await store.finish(scored(heir))
    assert (await store.claim("rule", "", 9)).jobs == ()
    assert (await store.get(leader)).grades == SCORED


async def test_a_full_queue_refuses_and_names_the_fidelity(store):
    for number in range(4):
        await create(store, spec(str(number)))
    with pytest.raises(CapacityExhausted, match="rule"):
        await create(store, spec("one more"))
    assert (await create(store, spec("x", fidelity="full")))[0] == "queued"


async def test_a_batch_that_does_not_fit_stores_nothing(store):
    specs = [spec(str(number), request_id=str(number)) for number in range(5)]
    with pytest.raises(CapacityExhausted):
        await store.create_many(specs)
    assert (await store.depths())["rule"] == 0
    assert [how for how, _ in await store.create_many(specs[:4])] == ["queued"] * 4


async def test_stored_bytes_are_bounded_and_freed(store, redis_client, prefix):
    store = VerificationStore(redis_client, "box", limits(most_bytes=4000), prefix)
    _, job_id = await create(store, spec(payload='{"x":"' + "y" * 5000 + '"}'))
    with pytest.raises(CapacityExhausted, match="bytes"):
        await create(store, spec("b"))
    await store.cancel_job(job_id)
    assert await redis_client.get(f"{prefix}bytes") == b"0"
    assert (await create(store, spec("b")))[0] == "queued"


async def test_only_jobs_of_one_verifier_are_claimed_together_in_order(store):
    ids = [(await create(store, spec(str(n), verifier=v)))[1] for n, v in enumerate(["t/a", "t/a", "t/b", "t/a"])]
    claim = await store.claim("rule", "", 9)
    assert ([job.job_id for job in claim.jobs], claim.head) == (ids[:2], "t/b")
    assert await store.claim("rule", "t/a", 9) == type(claim)("t/b", ())
    assert [job.job_id for job in (await store.claim("rule", "", 9)).jobs] == ids[2:3]


async def test_priority_goes_first_but_age_wins_in_the_end(redis_client, prefix):
    store = VerificationStore(redis_client, "box", limits(priority_seconds=1e-6), prefix)
    ids = {name: (await create(store, spec(name, priority=p)))[1] for name, p in [("a", 0), ("b", -1000), ("c", 1e9)]}
    assert (await claim_one(store)).job_id == ids["c"]
    await asyncio.sleep(0.01)  # more than the priority of b is worth
    _, young = await create(store, spec("d"))
    order = [(await claim_one(store)).job_id for _ in range(3)]
    assert order == [ids["a"], ids["b"], young]


async def test_a_changed_priority_moves_a_waiting_job(store):
    _, first = await create(store, spec("a"))
    _, second = await create(store, spec("b"))
    assert await store.set_priority(second, 3.0)
    assert (await store.get(second)).priority == 3.0
    assert (await claim_one(store)).job_id == second
    assert not await store.set_priority(second, 4.0)
    assert await store.set_priority(first, -3.0)
    with pytest.raises(NotFound):
        await store.set_priority("0" * 32, 1.0)


async def test_a_result_after_the_lease_was_lost_changes_nothing(store, redis_client, prefix):
    _, job_id = await create(store, spec())
    claimed = await claim_one(store)
    successor = VerificationStore(redis_client, "box", limits(), prefix)
    assert await successor.sweep() == (1, 0)
    again = await claim_one(successor)
    assert again.attempt == 2
    assert await store.heartbeat([job_id]) == {job_id}
    assert not await store.finish(scored(claimed))
    assert await successor.finish(late(again))
    assert outcomes(await store.get(job_id)) == ["timeout"]


async def test_a_repeated_finish_is_the_same_finish(store):
    await create(store, spec())
    claimed = await claim_one(store)
    assert await store.finish(scored(claimed))
    position = await store.position("run", "")
    assert await store.finish(scored(claimed))
    assert await store.position("run", "") == position != "0-0"
    assert (await store.report("run")).executed == 1


async def test_text_without_utf8_spoils_no_end_that_travels_with_it(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(3)]
    first, second, third = (await store.claim("rule", "", 9)).jobs
    strange = JobEnd(job=second, outcome="infra_error", message="a\ud800b")
    assert await asyncio.gather(*(store.finish(end) for end in (scored(first), strange, scored(third)))) == [True] * 3
    jobs = [await store.get(job_id) for job_id in ids]
    assert [outcomes(job) for job in jobs] == [["scored"], ["infra_error"], ["scored"]]
    assert jobs[1].error == "a?b"


async def test_a_job_graded_by_its_equal_while_it_was_at_work_ends_when_it_is_given_back(store):
    outside = {"verifier": "external/x", "queue": "external/x"}
    (_, claimed), (_, equal) = [(await store.create(spec(**outside))) for _ in range(2)]
    (lease,) = (await store.claim_for("external/x", "external/x", 1, "caller", 5.0)).jobs
    assert lease.job_id == claimed.job_id
    grade = Grade(outcome="scored", reward=4.0)
    await OutsideCallers(store).complete(equal.job_id, equal.token, (grade,), 0.0)
    assert (await store.get(claimed.job_id)).state == "running"
    assert await store.release(lease, "the caller went away", counted=True) == "ended"
    job = await store.get(claimed.job_id)
    assert (job.state, job.grades, job.error) == ("ended", (grade,), "")


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


async def test_attempts_are_bounded_and_poison_becomes_a_dead_letter_that_can_be_read(store):
    _, job_id = await create(store, spec())
    assert await store.release(await claim_one(store), "boom", counted=True, cpu_seconds=1.5) == "queued"
    assert await store.release(await claim_one(store), "boom", counted=True) == "ended"
    job = await store.get(job_id)
    assert (outcomes(job), job.attempts, job.cpu_seconds) == (["infra_error"], 2, 1.5)
    assert job.reason == job.error == "boom (attempt 2 of 2)"
    letters, following = await store.dead_letters("run", 0, 10)
    assert ([letter.job_id for letter in letters], following) == ([job_id], -1)
    assert await store.content(job_id) == ("{}", ["a"])
    assert await store.forget_dead_letter(job_id)
    assert not await store.forget_dead_letter(job_id)
    with pytest.raises(WrongState):
        await store.content(job_id)


async def test_a_neighbours_failure_costs_no_attempt_and_no_place_in_the_queue(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(3)]
    for job in (await store.claim("rule", "", 2)).jobs:
        await store.release(job, "neighbour", counted=False)
    again = (await store.claim("rule", "", 9)).jobs
    assert [job.job_id for job in again] == ids
    assert {job.attempt for job in again} == {1}


async def test_the_death_of_a_service_costs_no_attempt_of_a_job_whose_turn_had_not_come(store, redis_client, prefix):
    ids = [(await create(store, spec(str(n))))[1] for n in range(4)]
    assert len((await store.claim("rule", "test/length", 9)).jobs) == 4
    assert await store.heartbeat(ids, begun={ids[1]: 0.25}) == set()
    successor = VerificationStore(redis_client, "box", limits(), prefix)
    assert await successor.sweep() == (4, 0)
    again = (await successor.claim("rule", "", 9)).jobs
    assert {job.job_id: job.attempt for job in again} == dict(zip(ids, (2, 2, 1, 1), strict=True))
    last = VerificationStore(redis_client, "box", limits(), prefix)
    assert await last.sweep() == (4, 0)  # these had a session each: all were at work
    jobs = await last.get_many(ids)
    assert [(job.state, job.attempts) for job in jobs] == [("ended", 2)] * 2 + [("queued", 1)] * 2


async def test_cancelled_jobs_end_in_every_state(store):
    _, queued = await create(store, spec("a"))
    assert await store.cancel_job(queued) == ""
    assert outcomes(await store.get(queued)) == ["cancelled"]
    assert (await store.claim("rule", "", 1)).jobs == ()
    _, running = await create(store, spec("b"))
    claimed = await claim_one(store)
    assert await store.cancel_job(running) == store.owner
    assert not await store.finish(scored(claimed))
    assert outcomes(await store.get(running)) == ["cancelled"]
    assert await store.cancel_job(running) == ""
    with pytest.raises(NotFound):
        await store.cancel_job("0" * 32)


@pytest.mark.parametrize(
    ("selector", "left"),
    [
        (Selector(run="r1"), {"r2/g1/1"}),
        (Selector(run="r1", group="g1"), {"r1/g2/2", "r1/g2/3", "r2/g1/1"}),
        (Selector(run="r1", older_than=3), {"r1/g2/3", "r2/g1/1"}),
        (Selector(run="r1", group="g2", older_than=3), {"r1/g1/1", "r1/g2/3", "r2/g1/1"}),
        (Selector(run="nobody"), {"r1/g1/1", "r1/g2/2", "r1/g2/3", "r2/g1/1"}),
    ],
)
async def test_a_selector_cancels_what_it_names_and_nothing_else(store, selector, left):
    rows = [("r1", "g1", 1), ("r1", "g2", 2), ("r1", "g2", 3), ("r2", "g1", 1)]
    ids = {}
    for run, group, version in rows:
        name = f"{run}/{group}/{version}"
        _, ids[name] = await create(store, spec(name, run=run, group=group, policy_version=version))
    cancelled = await store.cancel(selector)
    assert set(cancelled) == {job_id for name, job_id in ids.items() if name not in left}
    assert {name for name, job_id in ids.items() if (await store.get(job_id)).state == "queued"} == left


async def test_a_cancelled_follower_leaves_the_leader_alone_and_the_other_way_round(store, redis_client, prefix):
    _, leader = await create(store, spec())
    followers = [(await create(store, spec()))[1] for _ in range(2)]
    claimed = await claim_one(store)
    assert (await store.claim("rule", "", 9)).jobs == ()
    await store.cancel_job(followers[0])
    listeners = await redis_client.smembers(f"{prefix}parked:{answer_keys(spec())[0]}")
    assert listeners == {followers[1].encode()}
    assert (await store.get(leader)).state == "running"
    await store.cancel_job(leader)
    assert not await store.finish(scored(claimed))
    await store.finish(scored(await claim_one(store)))
    assert [outcomes(await store.get(each))[0] for each in (leader, *followers)] == ["cancelled", "cancelled", "scored"]


async def pass_deadline(redis_client, prefix, job_id):
    """As if its deadline were over."""
    await redis_client.hset(f"{prefix}job:{job_id}", "deadline", 1)
    await redis_client.zadd(f"{prefix}deadlines", {job_id: 1})


async def test_a_deadline_that_passes_in_the_queue_is_a_timeout(store, redis_client, prefix):
    _, job_id = await create(store, spec())
    _, follower = await create(store, spec())
    await pass_deadline(redis_client, prefix, job_id)
    assert await store.sweep() == (0, 1)
    assert outcomes(await store.get(job_id)) == ["timeout"]
    assert (await claim_one(store)).job_id == follower


async def test_a_claim_after_the_deadline_ends_the_job_and_takes_the_next(store, redis_client, prefix):
    _, job_id = await create(store, spec("a"))
    _, following = await create(store, spec("b"))
    await pass_deadline(redis_client, prefix, job_id)
    assert [job.job_id for job in (await store.claim("rule", "", 2)).jobs] == [following]
    assert outcomes(await store.get(job_id)) == ["timeout"]


async def test_a_job_that_waits_for_another_ones_answer_keeps_its_own_deadline(store, redis_client, prefix):
    await create(store, spec())
    _, follower = await create(store, spec())
    await claim_one(store)
    await store.claim("rule", "", 9)
    await pass_deadline(redis_client, prefix, follower)
    assert await store.sweep() == (0, 1)
    assert outcomes(await store.get(follower)) == ["timeout"]


async def test_a_worker_that_keeps_its_lease_cannot_keep_a_job_past_its_deadline(store, redis_client, prefix):
    _, job_id = await create(store, spec())
    await claim_one(store)
    await pass_deadline(redis_client, prefix, job_id)
    assert await store.sweep() == (0, 1)
    assert outcomes(await store.get(job_id)) == ["timeout"]
    assert await store.heartbeat([job_id]) == {job_id}


async def test_a_watcher_sees_each_ended_job_once_and_can_resume(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(3)]
    start = await store.position("run", "")
    for job in (await store.claim("rule", "", 3)).jobs:
        await store.finish(scored(job))
    stream = store.ended_jobs("run", start)
    first, token = await anext(stream)
    rest = store.ended_jobs("run", token)
    seen = [first.job_id, *[(await anext(rest))[0].job_id for _ in range(2)]]
    assert seen == ids
    assert await store.position("run", token) == token
    with pytest.raises(InvalidRequest):
        await store.position("run", "yesterday")


async def test_pages_hold_each_job_once_the_open_ones_first(store):
    ids = [(await create(store, spec(str(n))))[1] for n in range(4)]
    for job in (await store.claim("rule", "", 2)).jobs:
        await store.finish(scored(job))
    seen, token = [], ""
    for _ in range(9):
        jobs, token = await store.list_jobs("run", token, 1, ended=None)
        seen += [job.job_id for job in jobs]
        if not token:
            break
    assert seen == [ids[2], ids[3], ids[1], ids[0]]
    assert [job.job_id for job in (await store.list_jobs("run", "", 9, ended=True))[0]] == [ids[1], ids[0]]
    assert [job.job_id for job in (await store.list_jobs("run", "", 9, ended=False))[0]] == ids[2:]
    for strange in ("x", "live:", "ended:1", "live:-1"):
        with pytest.raises(InvalidRequest):
            await store.list_jobs("run", strange, 1, ended=None)


async def test_watchers_do_not_take_connections_from_the_work(valkey_url, prefix):
    async with (
        open_redis(valkey_url, max_connections=1, wait_seconds=0.1) as client,
        open_redis(valkey_url, max_connections=1) as watching,
    ):
        store = VerificationStore(client, "box", limits(), prefix, watching=watching)
        watcher = asyncio.create_task(anext(store.ended_jobs("run", "0-0")))
        await asyncio.sleep(0)
        _, job_id = await create(store, spec())
        await store.finish(scored(await claim_one(store)))
        assert (await asyncio.wait_for(watcher, 20))[0].job_id == job_id


async def test_unknown_grades_of_a_group_have_one_row_per_answer(store):
    _, job_id = await create(store, spec(answers=("a", "b", "c", "a")))
    await store.cancel_job(job_id)
    job = await store.get(job_id)
    assert [(grade.outcome, grade.message) for grade in job.grades] == [("cancelled", "cancelled on request")] * 4


async def test_a_report_counts_answers_by_what_became_of_them(store):
    await create(store, spec(answers=("a", "a", "b")))
    await store.finish(dataclasses.replace(scored(await claim_one(store)), cpu_seconds=2.0))
    await create(store, spec(answers=("a", "c")))
    await store.finish(late(await claim_one(store)))
    report = await store.report("run")
    assert {outcome: count for outcome, count in report.outcomes.items() if count} == {"scored": 4, "timeout": 1}
    assert (report.executed, report.reused, report.cpu_seconds) == (2, 2, 3.0)
    assert report.lengths.answers == 3
    await create(store, spec("d"))
    await store.finish(dataclasses.replace(late(await claim_one(store)), cpu_seconds=0.0))
    report = await store.report("run")
    assert (report.outcomes["timeout"], report.lengths.answers) == (2, 3)  # the deadline passed before its work began


async def test_ended_jobs_leave_nothing_but_themselves(store, redis_client, prefix):
    _, job_id = await create(store, spec(payload='{"big":"' + "x" * 10000 + '"}', group="g"))
    _, follower = await create(store, spec(payload='{"big":"' + "x" * 10000 + '"}', group="g"))
    (claimed,) = (await store.claim("rule", "", 9)).jobs
    await store.finish(scored(claimed))
    assert (await store.get(follower)).state == "ended"
    fields = await redis_client.hkeys(f"{prefix}job:{job_id}")
    assert not {b"payload", b"answers", b"own", b"score"} & set(fields)
    keys = {key.decode().removeprefix(prefix).split(":")[0] async for key in redis_client.scan_iter(f"{prefix}*")}
    assert keys == {"job", "cache", "ended", "report", "runs", "reuse", "bytes"}
    assert await redis_client.get(f"{prefix}bytes") == b"0"
