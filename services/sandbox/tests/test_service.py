"""The gRPC face over a real server, real children and a real Valkey."""

import asyncio
import random
import uuid

import grpc
import pytest
import pytest_asyncio
from prometheus_client import generate_latest
from pydantic import ValidationError
from sandbox_calls import creation, ended, refusal

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError, reason_of
from reflux_kit.server import running
from reflux_sandbox.main import build
from reflux_sandbox.settings import SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["SandboxService"].methods]
STATUS = pb.RunCodeResponse.Status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(namespaces, valkey_url, here):
    settings = SandboxSettings(
        listen="127.0.0.1:0",
        redis_url=valkey_url,
        graders="sample_graders",
        import_folders=(here,),
        idle_children=2,
        code_concurrency=2,
        most_queued=200,
        child_memory_bytes=512 << 20,
        drain_seconds=0,
    )
    async with build(settings) as service, running(service, settings) as bound:
        yield bound.grpc


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(address):
    async with open_channel(address) as opened:
        yield opened


@pytest.fixture
def stub(channel):
    return SandboxServiceStub(channel)


@pytest.fixture
def run():
    return f"run-{uuid.uuid4().hex[:8]}"


async def test_a_watcher_gets_the_grades_of_a_created_job(stub, run):
    watch = stub.WatchVerifications(pb.WatchVerificationsRequest(run=run))
    await watch.initial_metadata()
    created = (await stub.CreateVerification(creation(run))).verification
    event = await asyncio.wait_for(watch.read(), 20)
    assert event.verification.name == created.name
    assert [grade.reward for grade in event.verification.grades] == [1.0, 2.0]
    assert {grade.outcome for grade in event.verification.grades} == {Grade.OUTCOME_SCORED}
    assert event.verification.grades[0].figures[0].name == "pid"
    watch.cancel()
    second = (await stub.CreateVerification(creation(run, answers=("ccc",)))).verification
    resumed = stub.WatchVerifications(pb.WatchVerificationsRequest(run=run, resume_token=event.resume_token))
    assert (await asyncio.wait_for(resumed.read(), 20)).verification.name == second.name
    resumed.cancel()


async def test_equal_work_comes_from_the_cache(stub, run):
    first = (await stub.CreateVerification(creation(run))).verification
    await ended(stub, first.name)
    second = (await stub.CreateVerification(creation(run))).verification
    assert (second.state, second.cached) == (Verification.STATE_ENDED, True)
    assert second.name != first.name
    assert second.content_hash == (await ended(stub, first.name)).content_hash
    assert [grade.reward for grade in second.grades] == [1.0, 2.0]


async def test_eight_equal_answers_are_graded_once(stub, run):
    requests = [creation(run, "test/slow", ("0.1",)) for _ in range(8)]
    names = [(await stub.CreateVerification(request)).verification.name for request in requests]
    jobs = [await ended(stub, name) for name in names]
    assert sum(job.attempts for job in jobs) == 1
    assert all(job.grades[0].outcome == Grade.OUTCOME_SCORED for job in jobs)


async def test_a_repeated_request_id_creates_nothing(stub, run):
    request = creation(run)
    first = (await stub.CreateVerification(request)).verification
    again = (await stub.CreateVerification(request)).verification
    assert again.name == first.name


async def test_a_cancelled_job_is_unknown_and_stays_cancelled(stub, run):
    name = (await stub.CreateVerification(creation(run, "test/slow", ("30",)))).verification.name
    cancelled = (await stub.CancelVerification(pb.CancelVerificationRequest(name=name))).verification
    assert cancelled.state == Verification.STATE_ENDED
    assert cancelled.grades[0].outcome == Grade.OUTCOME_CANCELLED
    again = (await stub.CancelVerification(pb.CancelVerificationRequest(name=name))).verification
    assert again.grades[0].outcome == Grade.OUTCOME_CANCELLED


async def test_a_job_past_its_deadline_is_a_timeout_with_reward_zero_but_not_scored(stub, run):
    name = (await stub.CreateVerification(creation(run, "test/slow", ("30",), deadline_seconds=0.3))).verification.name
    job = await ended(stub, name)
    assert job.grades[0].outcome == Grade.OUTCOME_TIMEOUT
    assert "deadline" in job.error


async def test_code_runs_and_its_end_is_typed(stub):
    done = await stub.RunCode(pb.RunCodeRequest(code="print(6 * 7)"))
    assert (done.status, done.exit_code, done.stdout) == (STATUS.STATUS_OK, 0, b"42\n")
    failed = await stub.RunCode(pb.RunCodeRequest(code="1/0"))
    assert (failed.status, failed.exit_code) == (STATUS.STATUS_NONZERO, 1)
    slow = await stub.RunCode(pb.RunCodeRequest(code="while True: pass", timeout_seconds=0.2))
    assert slow.status == STATUS.STATUS_TIMEOUT
    hungry = await stub.RunCode(pb.RunCodeRequest(code="bytearray(1 << 29)", memory_bytes=64 << 20))
    assert hungry.status == STATUS.STATUS_MEMORY


async def test_more_runs_than_may_wait_are_refused(stub):
    request = pb.RunCodeRequest(code="import time; time.sleep(0.05)")
    results = await asyncio.gather(*(stub.RunCode(request) for _ in range(24)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert 0 < len(refused) <= 6


async def test_status_names_the_tier_and_the_verifiers(stub):
    status = await stub.GetStatus(pb.GetStatusRequest())
    assert status.tier == "prefork"
    assert any("seccomp" in reason for reason in status.reasons)
    assert "test/length" in status.verifiers
    assert [queue.fidelity for queue in status.queues] == ["rule", "surrogate", "full", "remote"]


async def test_metrics_show_outcomes_queues_children_and_cache_hits(stub, run):
    await ended(stub, (await stub.CreateVerification(creation(run))).verification.name)
    await stub.CreateVerification(creation(run))
    text = generate_latest().decode()
    for line in (
        'reflux_sandbox_grades_total{outcome="scored",verifier="test/length"}',
        'reflux_sandbox_jobs_total{how="cached"}',
        'reflux_sandbox_queue_jobs{fidelity="rule"}',
        'reflux_sandbox_answers{how="executed"}',
        "reflux_sandbox_dead_letters 0.0",
        'reflux_sandbox_children{state="idle"}',
        'reflux_sandbox_isolation_tier{tier="prefork"} 1.0',
        'reflux_sandbox_dispatch_seconds_bucket{fidelity="rule",le="0.005"}',
    ):
        assert line in text


BAD_CREATIONS = {
    "no verifier": {"verifier": ""},
    "request id that is no UUID": {"request_id": "x"},
    "no run": {"run": ""},
    "run with a separator": {"run": "a b"},
    "payload that is no JSON": {"payload": b"{"},
    "payload that is no UTF-8": {"payload": b"\xff\xfe"},
    "payload that is a list": {"payload": b"[]"},
    "payload with NaN": {"payload": b'{"a": NaN}'},
    "payload nested too deeply": {"payload": b'{"a":' + b"[" * 100_000},
    "payload of 2 MB": {"payload": b'{"a":"' + b"x" * (2 << 20) + b'"}'},
    "no answers": {"answers": []},
    "an answer of 100 kB": {"answers": ["x" * 100_000]},
    "negative deadline": {"deadline_seconds": -1.0},
    "endless deadline": {"deadline_seconds": float("inf")},
    "deadline that is no number": {"deadline_seconds": float("nan")},
}


@pytest.mark.parametrize("name", BAD_CREATIONS)
async def test_a_bad_creation_is_refused_with_what_would_work(stub, run, name):
    error = await refusal(stub.CreateVerification(creation(**({"run": run} | BAD_CREATIONS[name]))))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_unknown_names_are_not_found(stub, run):
    error = await refusal(stub.CreateVerification(creation(run, "test/nothing")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "test/length" in error.details()
    missing = pb.GetVerificationRequest(name="verifications/" + "0" * 32)
    assert (await refusal(stub.GetVerification(missing))).code() is grpc.StatusCode.NOT_FOUND
    traversal = pb.GetVerificationRequest(name="verifications/../../request:x")
    assert (await refusal(stub.GetVerification(traversal))).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "changes",
    [
        {"code": ""},
        {"timeout_seconds": -1.0},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": 1e9},
        {"memory_bytes": 1},
        {"memory_bytes": 1 << 60},
    ],
)
async def test_limits_of_code_are_refused_not_lowered(stub, changes):
    request = pb.RunCodeRequest(**({"code": "pass"} | changes))
    assert (await refusal(stub.RunCode(request))).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS)
async def test_empty_and_random_requests_get_a_status(channel, caplog, method):
    path = f"/reflux.sandbox.v1.SandboxService/{method}"
    dice = random.Random(method)
    allowed = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    for raw in [b"", *(dice.randbytes(dice.randrange(1, 200)) for _ in range(8))]:
        opened = channel.unary_stream if method == "WatchVerifications" else channel.unary_unary
        assert await opened(path)(raw, timeout=20).code() in allowed
    assert "Traceback" not in caplog.text


async def test_a_taken_port_cannot_be_served(address, valkey_url):
    settings = SandboxSettings(listen=address, redis_url=valkey_url, graders="", idle_children=1, drain_seconds=0)
    async with build(settings) as service:
        with pytest.raises(StartupError, match=address):
            async with running(service, settings):
                pass


async def test_calls_without_a_token_are_refused_when_there_is_a_secret(namespaces, valkey_url):
    settings = SandboxSettings(
        listen="127.0.0.1:0", redis_url=valkey_url, graders="", idle_children=1, drain_seconds=0, stack_secret="s" * 32
    )
    async with build(settings) as service, running(service, settings) as bound:
        async with open_channel(bound.grpc) as channel:
            error = await refusal(SandboxServiceStub(channel).RunCode(pb.RunCodeRequest(code="print(1)")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(bound.grpc, settings) as channel:
            result = await SandboxServiceStub(channel).RunCode(pb.RunCodeRequest(code="print(1)"))
        assert result.stdout == b"1\n"


async def test_a_bad_setting_names_its_key():
    with pytest.raises(ValidationError, match="isolation"):
        SandboxSettings(isolation="bubblewrap")


async def test_a_full_queue_is_resource_exhausted(valkey_url, namespaces, here, run):
    settings = SandboxSettings(
        listen="127.0.0.1:0",
        redis_url=valkey_url.replace("/0", "/1"),
        graders="sample_graders",
        import_folders=(here,),
        idle_children=1,
        most_queued=2,
        drain_seconds=0,
    )
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        stub = SandboxServiceStub(channel)
        errors = []
        for number in range(8):
            try:
                await stub.CreateVerification(creation(run, "test/slow", ("9", str(number))))
            except grpc.aio.AioRpcError as error:
                errors.append((error.code(), reason_of(error)))
    assert set(errors) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "CAPACITY_EXHAUSTED")}
