"""Claims, batches, leases and failures, with real children and a real Valkey."""

import asyncio

import pytest

from reflux_sandbox.batch import Batch
from reflux_sandbox.dispatcher import Dispatcher, DispatchLimits
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.jobs import REMOTE, JobSpec
from reflux_sandbox.leases import Leases
from reflux_sandbox.remote.base import OpenSession
from reflux_sandbox.store import StoreLimits, VerificationStore


@pytest.fixture
def store(redis_client, prefix):
    limits = StoreLimits(most_queued=1000, lease_seconds=2.0, most_attempts=2, keep_seconds=60, cache_seconds=60)
    return VerificationStore(redis_client, "box", limits, prefix)


@pytest.fixture
async def dispatcher(namespaces, isolation_options, store):
    isolation = PreforkIsolation(**isolation_options())
    await isolation.start()
    limits = DispatchLimits(
        concurrency={"rule": 2, "surrogate": 1, "full": 1}, batch_jobs=64, batch_seconds=0.5, memory_bytes=256 << 20
    )
    async with Dispatcher(store, isolation, limits) as running:
        yield running
    await isolation.close()


def spec_of(verifier, version, *answers, fidelity="rule", seconds=20.0, queue=""):
    return JobSpec(
        verifier=verifier,
        version=version,
        fidelity=fidelity,
        payload="{}",
        answers=answers,
        deadline_seconds=seconds,
        run="run",
        traceparent="",
        queue=queue,
    )


async def submit(store, dispatcher, verifier, *answers, seconds=20.0, version="", queue=""):
    info = dispatcher.verifiers[verifier]
    given = {"fidelity": info.fidelity, "seconds": seconds, "queue": queue}
    spec = spec_of(verifier, version or info.version, *answers, **given)
    _, job = await store.create(spec)
    dispatcher.wake(info.fidelity, verifier)
    return job.job_id


async def ended(store, job_id):
    for _ in range(2000):
        job = await store.get(job_id)
        if job.state == "ended":
            return job
        await asyncio.sleep(0.01)
    pytest.fail(f"job {job_id} did not end")


def outcomes(job):
    return [grade.outcome for grade in job.grades]


async def test_a_group_is_graded_in_one_job(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/length", "a", "bb", "ccc"))
    assert [grade.reward for grade in job.grades] == [1.0, 2.0, 3.0]
    assert outcomes(job) == ["scored"] * 3


async def test_jobs_of_a_trusted_verifier_share_a_child(store, dispatcher):
    sessions = dispatcher.sessions
    ids = [await submit(store, dispatcher, "test/length", f"a{number}") for number in range(100)]
    jobs = [await ended(store, job_id) for job_id in ids]
    assert all(outcomes(job) == ["scored"] for job in jobs)
    assert dispatcher.sessions - sessions <= 10


async def test_an_untrusted_verifier_gets_a_child_per_job(store, dispatcher):
    sessions = dispatcher.sessions
    ids = [await submit(store, dispatcher, "test/apart", f"a{number}") for number in range(6)]
    for job_id in ids:
        await ended(store, job_id)
    assert dispatcher.sessions - sessions == 6


async def test_a_hanging_job_times_out_and_its_neighbours_are_scored(store, dispatcher):
    hanging = await submit(store, dispatcher, "test/hang", "hang", seconds=0.4)
    others = [await submit(store, dispatcher, "test/hang", f"x{number}") for number in range(6)]
    jobs = [await ended(store, job_id) for job_id in others]
    assert all((outcomes(job), job.attempts) == (["scored"], 1) for job in jobs)
    job = await ended(store, hanging)
    assert (outcomes(job), job.attempts) == (["timeout"], 1)


async def test_a_crash_is_repeated_and_then_unknown(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/crash", "bug"))
    assert (outcomes(job), job.attempts) == (["infra_error"], 2)
    assert "a bug of the verifier" in job.error
    job = await ended(store, await submit(store, dispatcher, "test/crash", "segfault"))
    assert (outcomes(job), job.attempts) == (["infra_error"], 2)
    assert "ended with -6" in job.error


async def test_a_greedy_verifier_is_unknown_and_the_pool_goes_on(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/memory", "x"))
    assert outcomes(job) == ["infra_error"]
    assert outcomes(await ended(store, await submit(store, dispatcher, "test/length", "x"))) == ["scored"]


async def test_malformed_grades_are_unknown(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/malformed", "x"))
    assert outcomes(job) == ["infra_error"]
    assert "malformed" in job.error


async def test_a_job_of_another_version_is_not_graded(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/length", "x", version="0.9"))
    assert outcomes(job) == ["infra_error"]
    assert job.error == "test/length is installed as version 1, the job wants 0.9"
    job = await ended(store, await submit(store, dispatcher, "test/length", "x"))
    assert outcomes(job) == ["scored"]


async def test_a_verifier_tells_how_far_it_has_come(store, dispatcher):
    job_id = await submit(store, dispatcher, "test/telling", "0.25")
    async with asyncio.timeout(30):
        while (job := await store.get(job_id)).progress != 0.25:
            assert job.state in ("queued", "running")
            await asyncio.sleep(0.02)
    await store.cancel_job(job_id)
    dispatcher.abandon(job_id)


async def test_a_child_that_floods_with_progress_is_ended(store, dispatcher):
    job = await ended(store, await submit(store, dispatcher, "test/flood", "a"))
    assert job.grades[0].outcome == "infra_error"
    assert "floods" in job.error


async def test_cancelling_kills_the_child_at_work(store, dispatcher):
    job_id = await submit(store, dispatcher, "test/slow", "60")
    while (await store.get(job_id)).state != "running":
        await asyncio.sleep(0.01)
    assert await store.cancel_job(job_id)
    dispatcher.abandon(job_id)
    following = await ended(store, await submit(store, dispatcher, "test/slow", "0"))
    assert outcomes(following) == ["scored"]
    assert outcomes(await store.get(job_id)) == ["cancelled"]


async def test_concurrency_is_bounded_per_fidelity(store, dispatcher):
    slow = await submit(store, dispatcher, "test/slow", "0.3")
    waiting = await submit(store, dispatcher, "test/slow", "0.01")
    rule = await ended(store, await submit(store, dispatcher, "test/length", "x"))
    assert outcomes(rule) == ["scored"]
    assert (await store.get(waiting)).state == "queued"
    await ended(store, slow)
    assert outcomes(await ended(store, waiting)) == ["scored"]


class Stuck(PreforkIsolation):
    async def acquire(self, family=""):
        await asyncio.Event().wait()


async def test_a_sandbox_without_children_ends_jobs_at_their_deadline(isolation_options, store):
    isolation = Stuck(**isolation_options())
    limits = DispatchLimits(
        concurrency={"rule": 1, "surrogate": 1, "full": 1}, batch_jobs=1, batch_seconds=0.0, memory_bytes=1
    )
    async with Dispatcher(store, isolation, limits) as running:
        running.verifiers["test/length"] = VerifierInfo("test/length", "1", "rule", True, 0.1)
        job = await ended(store, await submit(store, running, "test/length", "x", seconds=0.2))
    assert outcomes(job) == ["timeout"]
    assert "no child was ready" in job.error


class Place(OpenSession):
    """Grades each answer with 1.0 and does nothing else."""

    def session(self, info):
        return self

    async def grade(self, verifier, payload, answers):
        return {"grades": [{"outcome": "scored", "reward": 1.0, "figures": {}, "message": ""} for _ in answers]}


async def test_a_session_takes_no_further_jobs_when_its_window_is_over(isolation_options, store):
    info = VerifierInfo("test/length", "1", "rule", True, 0.1)
    limits = DispatchLimits(concurrency={}, remote_concurrency=1, batch_jobs=64, batch_seconds=0.0, memory_bytes=1)
    isolation = Stuck(**isolation_options())
    running = Dispatcher(store, isolation, limits, route=lambda _info: Place(), elsewhere=[info])
    ids = [await submit(store, running, "test/length", f"a{number}", queue=REMOTE) for number in range(3)]
    async with running:
        for job_id in ids:
            assert outcomes(await ended(store, job_id)) == ["scored"]
    assert running.sessions == 3


async def test_two_verifiers_in_turn_both_progress(store, dispatcher):
    names = ["test/length", "test/hang"] * 15
    ids = [await submit(store, dispatcher, name, f"{name}{number}") for number, name in enumerate(names)]
    for job_id in ids:
        assert outcomes(await ended(store, job_id)) == ["scored"]


async def test_a_deadline_that_passed_before_the_turn_of_a_job_costs_its_neighbours_nothing(store):
    leases = Leases(store)
    for number in range(3):
        await store.create(spec_of("test/length", "1", f"a{number}"))
    batch, _ = await leases.claim("rule", "", 9)
    batch[1].deadline = asyncio.get_running_loop().time()
    info = VerifierInfo("test/length", "1", "rule", True, 0.1)
    await Batch(leases, info, "rule", len(batch)).run(batch, Place(), lambda _most: asyncio.sleep(0, []))
    jobs = [await ended(store, leased.job.job_id) for leased in batch]
    assert [(outcomes(job), job.attempts) for job in jobs] == [(["scored"], 1), (["timeout"], 1), (["scored"], 1)]
    assert (jobs[1].error, jobs[1].cpu_seconds) == ("the deadline passed before its turn in the child", 0.0)
