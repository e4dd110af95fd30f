"""Batches, pages, selectors, outside callers, dead letters, reports: a real server, real children, a real Valkey."""

import asyncio
import json
import uuid

import grpc
import pytest
import pytest_asyncio
import redis.asyncio
from sandbox_calls import HANG_SECONDS, create, creation, ended, outcomes, read, refusal, until

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_kit.server import running
from reflux_sandbox.main import build
from reflux_sandbox.settings import SandboxSettings
from reflux_sandbox.store import PREFIX

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def redis_url(valkey_url):
    """A database of this module's own."""
    return valkey_url.replace("/0", "/2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(namespaces, redis_url, here):
    settings = SandboxSettings(
        listen="127.0.0.1:0",
        redis_url=redis_url,
        graders="sample_graders",
        import_folders=(here,),
        idle_children=1,
        most_queued=200,
        child_memory_bytes=512 << 20,
        drain_seconds=0,
    )
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as opened:
        yield opened


@pytest.fixture
def stub(channel):
    return SandboxServiceStub(channel)


@pytest.fixture
def run():
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def instrument(run):
    """An external verifier of this test's own."""
    return f"external/{run}"


async def list_all(stub, run, **changes):
    jobs, token = [], ""
    while True:
        request = pb.ListVerificationsRequest(run=run, page_size=2, page_token=token, **changes)
        page = await stub.ListVerifications(request)
        jobs += page.verifications
        token = page.next_page_token
        if not token:
            return jobs


async def test_a_batch_is_one_job_per_request_and_safe_to_repeat(stub, run):
    said = {"group": "g1", "policy_version": 3, "sample_ids": ["s/0", "s/1"], "priority": 2.0, "cost_hint_seconds": 0.5}
    requests = [creation(run, answers=(f"a{n}", "b"), **said) for n in range(5)]
    batch = pb.BatchCreateVerificationsRequest(requests=requests)
    created = (await stub.BatchCreateVerifications(batch)).verifications
    again = (await stub.BatchCreateVerifications(batch)).verifications
    assert len({job.name for job in created}) == 5
    assert [job.name for job in again] == [job.name for job in created]
    jobs = [await ended(stub, job.name) for job in created]
    assert {tuple(outcomes(job)) for job in jobs} == {("SCORED", "SCORED")}
    assert sum(job.executed_answers for job in jobs) == 6
    job = jobs[0]
    assert (job.group, job.policy_version, list(job.sample_ids)) == ("g1", 3, ["s/0", "s/1"])
    assert (job.priority, job.cost_hint_seconds, job.version) == (2.0, 0.5, "1")
    assert job.cpu_seconds < 5
    assert job.create_time < job.deadline_time


async def test_a_batch_with_one_bad_request_stores_nothing_and_names_it(stub, run):
    requests = [creation(run), creation(run, answers=[])]
    error = await refusal(stub.BatchCreateVerifications(pb.BatchCreateVerificationsRequest(requests=requests)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("requests[1]: ")
    assert await list_all(stub, run) == []
    many = pb.BatchCreateVerificationsRequest(requests=[pb.CreateVerificationRequest()] * 1001)
    assert (await refusal(stub.BatchCreateVerifications(many))).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": "2"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"fidelity": Verification.FIDELITY_FULL}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"priority": 1001.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"priority": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"cost_hint_seconds": -1.0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"group": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"group": "a\x1fb"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"sample_ids": ["one for two answers"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"policy_version": 1 << 60}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"verifier": "external/"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"verifier": "external/a b"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_cannot_be_had_is_refused(stub, run, changes, code):
    assert (await refusal(stub.CreateVerification(creation(run, **changes)))).code() is code


async def test_the_installed_version_and_fidelity_can_be_asked_for(stub, run):
    job = await create(stub, run, version="1", fidelity=Verification.FIDELITY_RULE)
    assert outcomes(await ended(stub, job.name)) == ["SCORED", "SCORED"]


async def test_100_mb_is_refused_and_the_service_goes_on(stub, run):
    error = await refusal(stub.CreateVerification(creation(run, payload=b'{"a":"' + b"x" * (100 << 20) + b'"}')))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcomes(await ended(stub, (await create(stub, run)).name)) == ["SCORED", "SCORED"]


async def test_an_answer_that_is_no_utf_8_is_refused(channel, run):
    good = creation(run, answers=["bad"]).SerializeToString()
    call = channel.unary_unary("/reflux.sandbox.v1.SandboxService/CreateVerification")
    error = await refusal(call(good.replace(b"bad", b"b\xffd"), timeout=HANG_SECONDS))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_lists_filter_by_state_and_group(stub, run, instrument):
    done = await ended(stub, (await create(stub, run, group="g1")).name)
    waiting = await create(stub, run, instrument, group="g2")
    assert [job.name for job in await list_all(stub, run)] == [waiting.name, done.name]
    assert [job.name for job in await list_all(stub, run, state=Verification.STATE_ENDED)] == [done.name]
    assert [job.name for job in await list_all(stub, run, state=Verification.STATE_QUEUED)] == [waiting.name]
    assert await list_all(stub, run, state=Verification.STATE_RUNNING) == []
    assert [job.name for job in await list_all(stub, run, group="g1")] == [done.name]
    strange = pb.ListVerificationsRequest(run=run, page_token="x")
    assert (await refusal(stub.ListVerifications(strange))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_selector_cancels_running_and_waiting_jobs_and_kills_their_children(stub, run):
    old = [await create(stub, run, "test/slow", ["60", str(n)], policy_version=n) for n in range(3)]
    await until(stub, old[0].name, lambda job: job.state == Verification.STATE_RUNNING)
    request = pb.CancelVerificationsRequest(run=run, older_than_policy_version=2)
    assert (await stub.CancelVerifications(request)).cancelled == 2
    assert [outcomes(await read(stub, job.name)) for job in old[:2]] == [["CANCELLED"] * 2] * 2
    await until(stub, old[2].name, lambda job: job.state == Verification.STATE_RUNNING)
    assert (await stub.CancelVerifications(pb.CancelVerificationsRequest(run=run))).cancelled == 1
    following = await create(stub, run, "test/slow", ["0"])
    assert outcomes(await ended(stub, following.name)) == ["SCORED"]


async def test_a_watcher_with_progress_sees_a_job_run_and_end(stub, run, instrument):
    watch = stub.WatchVerifications(pb.WatchVerificationsRequest(run=run, progress=True))
    await watch.initial_metadata()
    job = await create(stub, run, instrument)
    (claim,) = (await stub.ClaimVerifications(pb.ClaimVerificationsRequest(verifier=instrument))).claims
    lease = {"name": job.name, "token": claim.token}
    async with asyncio.timeout(HANG_SECONDS):
        first = (await watch.read()).verification
        assert (first.state, first.attempts, first.progress) == (Verification.STATE_RUNNING, 1, 0.0)
        await stub.RenewVerification(pb.RenewVerificationRequest(**lease, progress=0.5))
        await until_seen(watch, lambda seen: seen.progress == 0.5)
        await complete(stub, job.name, claim.token, 1.0, 2.0)
        last = await until_seen(watch, lambda seen: seen.state == Verification.STATE_ENDED)
    assert last.name == job.name
    watch.cancel()


async def until_seen(watch, condition):
    while not condition(seen := (await watch.read()).verification):
        assert seen.state == Verification.STATE_RUNNING
    return seen


def verdict(reward):
    return Grade(outcome=Grade.OUTCOME_SCORED, reward=reward, message="measured")


async def complete(stub, name, token, *rewards):
    request = pb.CompleteVerificationRequest(
        name=name, token=token, grades=[verdict(reward) for reward in rewards], cpu_seconds=30.0
    )
    return (await stub.CompleteVerification(request)).verification


async def test_an_outside_caller_claims_and_completes_and_may_repeat_itself(stub, run, instrument):
    job = await create(stub, run, instrument, ["a", "b", "a"])
    request = pb.ClaimVerificationsRequest(verifier=instrument, max_jobs=5)
    (claim,) = (await stub.ClaimVerifications(request)).claims
    assert (claim.verification.name, list(claim.answers)) == (job.name, ["a", "b"])
    assert json.loads(claim.payload) == {"of": run}
    assert claim.verification.completion_token == ""
    assert not (await stub.ClaimVerifications(request)).claims
    error = await refusal(complete(stub, job.name, claim.token, 1.0))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    done = await complete(stub, job.name, claim.token, 1.0, 2.0)
    assert [grade.reward for grade in done.grades] == [1.0, 2.0, 1.0]
    assert (done.cpu_seconds, done.executed_answers) == (30.0, 2)
    assert await complete(stub, job.name, claim.token, 7.0, 7.0) == done
    for token in ("", "other", job.completion_token):
        error = await refusal(complete(stub, job.name, token, 7.0, 7.0, 7.0))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert (await read(stub, job.name)) == done


async def test_the_creator_completes_without_a_claim_and_equal_jobs_hear_of_it(stub, run, instrument):
    job = await create(stub, run, instrument, ["a"])
    equal = await create(stub, run, instrument, ["a"])
    assert job.completion_token
    assert (await read(stub, job.name)).completion_token == ""
    await complete(stub, job.name, job.completion_token, 4.0)
    assert [grade.reward for grade in (await read(stub, equal.name)).grades] == [4.0]
    assert (await create(stub, run, instrument, ["a"], version="")).cached
    assert not (await create(stub, run, instrument, ["a"], version="recalibrated")).cached


async def test_a_claim_whose_lease_ended_cannot_complete(stub, run, instrument):
    job = await create(stub, run, instrument, ["lapse"])
    request = pb.ClaimVerificationsRequest(verifier=instrument, lease_seconds=1.0)
    (first,) = (await stub.ClaimVerifications(request)).claims
    await until(stub, job.name, lambda job: job.state == Verification.STATE_QUEUED)
    (second,) = (await stub.ClaimVerifications(pb.ClaimVerificationsRequest(verifier=instrument))).claims
    assert second.verification.attempts == 2
    assert (await refusal(complete(stub, job.name, first.token, 1.0))).code() is grpc.StatusCode.FAILED_PRECONDITION
    renew = pb.RenewVerificationRequest(name=job.name, token=first.token)
    assert (await refusal(stub.RenewVerification(renew))).code() is grpc.StatusCode.FAILED_PRECONDITION
    assert outcomes(await complete(stub, job.name, second.token, 1.0)) == ["SCORED"]


async def test_the_deadline_of_an_external_job_holds_whoever_has_it(stub, run, instrument, redis_url):
    job = await create(stub, run, instrument, ["late"])
    (claim,) = (await stub.ClaimVerifications(pb.ClaimVerificationsRequest(verifier=instrument))).claims
    async with redis.asyncio.from_url(redis_url) as client:
        job_id = job.name.removeprefix("verifications/")
        await client.hset(f"{PREFIX}job:{job_id}", "deadline", 1)
        await client.zadd(f"{PREFIX}deadlines", {job_id: 1})
    assert outcomes(await ended(stub, job.name)) == ["TIMEOUT"]
    assert (await refusal(complete(stub, job.name, claim.token, 1.0))).code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "grade",
    [
        Grade(outcome=Grade.OUTCOME_UNSPECIFIED),
        Grade(outcome=Grade.OUTCOME_TIMEOUT),
        Grade(outcome=Grade.OUTCOME_SCORED, reward=float("nan")),
        Grade(outcome=Grade.OUTCOME_INVALID, reward=1.0),
    ],
)
async def test_a_verdict_that_is_none_is_refused_and_the_job_waits_on(stub, run, instrument, grade):
    job = await create(stub, run, instrument, ["a"])
    request = pb.CompleteVerificationRequest(name=job.name, token=job.completion_token, grades=[grade])
    assert (await refusal(stub.CompleteVerification(request))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await read(stub, job.name)).state == Verification.STATE_QUEUED
    await stub.CancelVerifications(pb.CancelVerificationsRequest(run=run))


async def test_jobs_of_installed_verifiers_cannot_be_claimed_or_completed_from_outside(stub, run):
    claim = pb.ClaimVerificationsRequest(verifier="test/length")
    assert (await refusal(stub.ClaimVerifications(claim))).code() is grpc.StatusCode.INVALID_ARGUMENT
    job = await create(stub, run, "test/slow", ["60"])
    assert job.completion_token == ""
    assert (await refusal(complete(stub, job.name, "", 1.0))).code() is grpc.StatusCode.FAILED_PRECONDITION
    await stub.CancelVerification(pb.CancelVerificationRequest(name=job.name))


async def test_poison_becomes_a_dead_letter_that_can_be_tried_again(stub, run):
    job = await create(stub, run, "test/crash", ["segfault", "x"], sample_ids=["s/0", "s/1"])
    assert outcomes(await ended(stub, job.name)) == ["INFRA_ERROR"] * 2
    (letter,) = (await stub.ListDeadLetters(pb.ListDeadLettersRequest(run=run))).letters
    assert (letter.verification.name, letter.verification.attempts) == (job.name, 3)
    assert "attempt 3 of 3" in letter.reason
    assert (await stub.GetStatus(pb.GetStatusRequest())).dead_letters >= 1
    request = pb.RetryDeadLetterRequest(request_id=str(uuid.uuid4()), name=job.name)
    retried = (await stub.RetryDeadLetter(request)).verification
    assert retried.name != job.name
    assert list(retried.sample_ids) == ["s/0", "s/1"]
    letters = (await stub.ListDeadLetters(pb.ListDeadLettersRequest(run=run))).letters
    assert job.name not in [letter.verification.name for letter in letters]
    error = await refusal(stub.RetryDeadLetter(pb.RetryDeadLetterRequest(request_id=str(uuid.uuid4()), name=job.name)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    await stub.CancelVerifications(pb.CancelVerificationsRequest(run=run))


async def test_a_report_says_what_became_of_the_answers(stub, run):
    await ended(stub, (await create(stub, run, answers=["a", "a", "b"])).name)
    report = await stub.GetVerificationReport(pb.GetVerificationReportRequest(run=run))
    counts = {Grade.Outcome.Name(each.outcome): each.count for each in report.outcomes if each.count}
    assert counts == {"OUTCOME_SCORED": 3}
    assert (report.executed_answers, report.reused_answers, report.timeouts_follow_length) == (2, 1, False)
