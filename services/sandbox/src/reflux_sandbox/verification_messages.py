"""Turns jobs into messages, and what callers say about jobs into values."""

import math

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import verification_pb2
from reflux.sandbox.v1.verification_pb2 import Grade as GradeMessage
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit.errors import InvalidRequest
from reflux_sandbox.creation import parse_group, parse_policy_version
from reflux_sandbox.jobs import EXTERNAL, Claimed, Grade, Job, Outcome, Selector
from reflux_sandbox.messages import parse_run
from reflux_sandbox.report import Report

MAX_CLAIM = 100
MAX_LEASE_SECONDS = 7 * 86400.0
MAX_FIGURES = 256
MAX_MESSAGE_CHARACTERS = 500

_DEFAULT_PAGE, _MOST_PAGE = 50, 500
_DEFAULT_LEASE_SECONDS = 60.0
_VERDICTS: dict[int, Outcome] = {
    GradeMessage.OUTCOME_SCORED: "scored",
    GradeMessage.OUTCOME_INVALID: "invalid",
    GradeMessage.OUTCOME_INFRA_ERROR: "infra_error",
}


def to_verification(job: Job, *, with_token: bool = False) -> Verification:
    """The stored job as a message; `with_token` for its creator."""
    return Verification(
        name=f"verifications/{job.job_id}",
        run=job.run,
        verifier=job.verifier,
        version=job.version,
        fidelity=Verification.Fidelity.Value(f"FIDELITY_{job.fidelity.upper()}"),
        state=Verification.State.Value(f"STATE_{job.state.upper()}"),
        grades=_grades(job),
        attempts=job.attempts,
        content_hash=job.content_hash,
        cached=job.cached,
        error=job.error,
        queue_seconds=job.queue_seconds,
        run_seconds=job.run_seconds,
        priority=job.priority,
        group=job.group,
        policy_version=job.policy_version,
        sample_ids=job.sample_ids,
        cost_hint_seconds=job.cost_hint_seconds,
        cpu_seconds=job.cpu_seconds,
        executed_answers=job.executed,
        progress=job.progress,
        create_time=job.created,
        deadline_time=job.deadline,
        heartbeat_age_seconds=job.heartbeat_age_seconds,
        completion_token=job.token if with_token else "",
    )


def _grades(job: Job) -> list[GradeMessage]:
    if not job.partial:
        return [to_grade(grade) for grade in job.grades]
    known = job.partial
    return [to_grade(known[number]) if number in known else GradeMessage() for number in range(job.answers)]


def to_grade(grade: Grade) -> GradeMessage:
    """A grade as a message."""
    return GradeMessage(
        outcome=GradeMessage.Outcome.Value(f"OUTCOME_{grade.outcome.upper()}"),
        reward=grade.reward,
        figures=[verification_pb2.Figure(name=name, value=value) for name, value in grade.figures.items()],
        message=grade.message,
    )


def parse_grade(message: GradeMessage) -> Grade:
    """The verdict of an outside caller: a reward, or INFRA_ERROR for an answer that it could not grade. Raises
    InvalidRequest."""
    outcome = _VERDICTS.get(message.outcome)
    figures = {figure.name: figure.value for figure in message.figures}
    if outcome is None:
        raise InvalidRequest("a verdict is SCORED or INVALID, or INFRA_ERROR for an answer that could not be graded")
    if not all(map(math.isfinite, [message.reward, *figures.values()])) or len(figures) > MAX_FIGURES:
        raise InvalidRequest(f"rewards and figures must be finite numbers, at most {MAX_FIGURES} figures per answer")
    if outcome != "scored" and message.reward:
        raise InvalidRequest(f"the reward of an answer that is {outcome} is 0, got {message.reward}")
    return Grade(
        outcome=outcome, reward=message.reward, figures=figures, message=message.message[:MAX_MESSAGE_CHARACTERS]
    )


def parse_selector(request: pb.CancelVerificationsRequest) -> Selector:
    """Raises InvalidRequest."""
    older_than = parse_policy_version(request.older_than_policy_version)
    return Selector(run=parse_run(request.run), group=parse_group(request.group), older_than=older_than)


def page_size(wanted: int) -> int:
    """Items of a page."""
    return min(wanted or _DEFAULT_PAGE, _MOST_PAGE)


def parse_external(name: str) -> str:
    """The name of an external verifier; raises InvalidRequest."""
    if not name.startswith(EXTERNAL) or len(name) > 128:
        raise InvalidRequest(f"only jobs of verifiers that begin with {EXTERNAL} can be claimed, got {name[:60]!r}")
    return name


def parse_claim_size(wanted: int) -> int:
    """Jobs of one claim; raises InvalidRequest."""
    if wanted > MAX_CLAIM:
        raise InvalidRequest(f"max_jobs must be 1 to {MAX_CLAIM}, got {wanted}")
    return wanted or 1


def parse_lease(seconds: float) -> float:
    """The length of a lease; raises InvalidRequest."""
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_LEASE_SECONDS:
        raise InvalidRequest(f"lease_seconds must be 0 to {MAX_LEASE_SECONDS:.0f}, got {seconds}")
    return max(1.0, seconds) if seconds else _DEFAULT_LEASE_SECONDS


def to_claim(claimed: Claimed, job: Job) -> pb.ClaimedVerification:
    """A leased job for an outside caller."""
    return pb.ClaimedVerification(
        verification=to_verification(job),
        payload=claimed.payload.encode(),
        answers=claimed.answers,
        token=claimed.owner,
    )


def to_letter(job: Job) -> pb.DeadLetter:
    """A dead letter."""
    return pb.DeadLetter(verification=to_verification(job), reason=job.reason, end_time=job.ended)


def to_report_response(run: str, report: Report) -> pb.GetVerificationReportResponse:
    """The report of a run."""
    return pb.GetVerificationReportResponse(
        run=run,
        outcomes=[
            pb.OutcomeCount(outcome=GradeMessage.Outcome.Value(f"OUTCOME_{outcome.upper()}"), count=count)
            for outcome, count in report.outcomes.items()
        ],
        executed_answers=report.executed,
        reused_answers=report.reused,
        cpu_seconds=report.cpu_seconds,
        timeout_length_correlation=report.lengths.r,
        timeout_length_p_value=report.lengths.p_value,
        timeout_length_answers=report.lengths.answers,
        timeouts_follow_length=report.lengths.suspicious,
    )
