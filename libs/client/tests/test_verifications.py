"""`reflux verifications` against a server that speaks the real protocol."""

import asyncio
import json
import threading

import pytest
from click.testing import CliRunner

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import sandbox_service_pb2_grpc as sandbox_grpc
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_client.commands.verifications import report_text, verifications
from reflux_client.connection import ClientError
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings

JOB = Verification(
    name="verifications/" + "a" * 32,
    run="r1",
    verifier="external/person",
    state=Verification.STATE_ENDED,
    group="prompt/7",
    grades=[Grade(outcome=Grade.OUTCOME_SCORED, reward=1.0), Grade(outcome=Grade.OUTCOME_TIMEOUT)],
)


class Sandbox(sandbox_grpc.SandboxServiceServicer):
    """Answers with one job and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def ListVerifications(self, request, context):
        self.asked.append(request)
        return pb.ListVerificationsResponse(verifications=[JOB], next_page_token="" if request.page_token else "2")

    async def GetVerification(self, request, context):
        return pb.GetVerificationResponse(verification=JOB)

    async def CancelVerification(self, request, context):
        self.asked.append(request)
        return pb.CancelVerificationResponse(verification=JOB)

    async def CancelVerifications(self, request, context):
        self.asked.append(request)
        return pb.CancelVerificationsResponse(cancelled=3)

    async def ListDeadLetters(self, request, context):
        return pb.ListDeadLettersResponse(letters=[pb.DeadLetter(verification=JOB, reason="boom", end_time=1.0)])

    async def RetryDeadLetter(self, request, context):
        self.asked.append(request)
        return pb.RetryDeadLetterResponse(verification=JOB)

    async def ClaimVerifications(self, request, context):
        claim = pb.ClaimedVerification(verification=JOB, payload=b'{"of":1}', answers=["x"], token="t")
        return pb.ClaimVerificationsResponse(claims=[claim])

    async def CompleteVerification(self, request, context):
        self.asked.append(request)
        return pb.CompleteVerificationResponse(verification=JOB)

    async def GetVerificationReport(self, request, context):
        return pb.GetVerificationReportResponse(run=request.run)


@pytest.fixture
def sandbox(monkeypatch):
    """A server in a loop of its own, because a command runs one itself."""
    servicer = Sandbox()
    loop, started, ended, addresses = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), []

    async def serve():
        mount = Mount(servicer, sandbox_grpc.add_SandboxServiceServicer_to_server, "reflux.sandbox.v1.SandboxService")
        settings = ServiceSettings(listen="127.0.0.1:0", drain_seconds=0)
        async with running(Service((mount,)), settings) as bound:
            addresses.append(bound.grpc)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(30)
    monkeypatch.setenv("REFLUX_TRAINER_ADDRESS", addresses[0])
    monkeypatch.setenv("REFLUX_SANDBOX_ADDRESS", addresses[0])
    yield servicer
    loop.call_soon_threadsafe(ended.set)
    thread.join(30)
    loop.close()


def told(*words):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(verifications, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_jobs_are_listed_over_all_pages_and_shown_whole(sandbox):
    text = told("list", "r1", "--state", "ended", "--group", "prompt/7")
    assert text.count("prompt/7") == 2
    assert "1 scored, 1 timeout" in text
    assert [(asked.state, asked.group) for asked in sandbox.asked] == [(Verification.STATE_ENDED, "prompt/7")] * 2
    assert told("list", "r1", "--most", "1").count("external/person") == 1
    assert json.loads(told("show", "a" * 32))["verifier"] == "external/person"


def test_one_job_or_what_a_selector_means_is_cancelled(sandbox):
    told("cancel", "a" * 32)
    assert "3 jobs" in told("cancel", "--run", "r1", "--older-than", "4")
    one, many = sandbox.asked
    assert one.name == "verifications/" + "a" * 32
    assert (many.run, many.group, many.older_than_policy_version) == ("r1", "", 4)
    for words in ([], ["a" * 32, "--run", "r1"], ["a" * 32, "--group", "g"]):
        with pytest.raises(ClientError):
            told("cancel", *words)


def test_dead_letters_are_listed_and_tried_again(sandbox):
    assert "boom" in told("dead")
    assert JOB.name in told("retry", "a" * 32, "--deadline", "9")
    assert sandbox.asked[0].deadline_seconds == 9


def test_a_person_claims_and_completes(sandbox):
    claim = json.loads(told("claim", "external/person"))
    assert (claim["payload"], claim["answers"], claim["token"]) == ({"of": 1}, ["x"], "t")
    told("complete", claim["name"], "0.5", "invalid", "--token", "t", "--message", "seen")
    (asked,) = sandbox.asked
    assert [(grade.outcome, grade.reward) for grade in asked.grades] == [
        (Grade.OUTCOME_SCORED, 0.5),
        (Grade.OUTCOME_INVALID, 0.0),
    ]
    with pytest.raises(ClientError):
        told("complete", claim["name"], "good", "--token", "t")


def test_a_report_says_when_timeouts_are_suspicious(sandbox):
    assert "nothing conspicuous" in told("report", "r1")
    found = pb.GetVerificationReportResponse(
        outcomes=[pb.OutcomeCount(outcome=Grade.OUTCOME_SCORED, count=6)],
        executed_answers=3,
        reused_answers=3,
        timeout_length_correlation=0.5,
        timeouts_follow_length=True,
    )
    text = report_text(found)
    assert "6 scored" in text
    assert "(50%)" in text
    assert "SUSPICIOUS" in text
