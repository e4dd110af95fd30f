"""Parses requests into values and turns values into protos."""

import math
import re
import uuid
from dataclasses import dataclass

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import verification_pb2
from reflux_kit.errors import InvalidRequest, NotFound
from reflux_sandbox.execution import CodeRequest, CodeResult
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.jobs import Grade, Job, JobSpec, canonical_json

MAX_PAYLOAD_BYTES = 1 << 20
MAX_ANSWERS = 4096
MAX_ANSWER_CHARACTERS = 1 << 16
MAX_ANSWERS_CHARACTERS = 1 << 20
MAX_CODE_CHARACTERS = 1 << 20
MAX_DEADLINE_SECONDS = 7 * 86400.0

_NAME = re.compile(r"verifications/([0-9a-f]{32})")
_RUN = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_DEFAULT_DEADLINE = {"rule": 60.0, "surrogate": 300.0, "full": 3600.0}
_DEFAULT_CODE_SECONDS = 10.0
_DEFAULT_CODE_BYTES = 1 << 30
_LEAST_CODE_BYTES = 16 << 20


@dataclass(frozen=True)
class CreateCommand:
    """A parsed CreateVerification."""

    request_id: str
    spec: JobSpec


def parse_create(request: pb.CreateVerificationRequest, verifiers: dict[str, VerifierInfo]) -> CreateCommand:
    """Raises InvalidRequest for anything that can never be graded, NotFound for a verifier that is not installed."""
    request_id = _parse_uuid(request.request_id)
    run = parse_run(request.run)
    info = _parse_verifier(request.verifier, verifiers)
    spec = JobSpec(
        verifier=info.name,
        version=info.version,
        fidelity=info.fidelity,
        payload=_parse_payload(request.payload),
        answers=_parse_answers(list(request.answers)),
        deadline_seconds=_parse_deadline(request.deadline_seconds) or _DEFAULT_DEADLINE[info.fidelity],
        run=run,
        traceparent=request.traceparent if _TRACEPARENT.fullmatch(request.traceparent) else "",
    )
    return CreateCommand(request_id, spec)


def _parse_uuid(text: str) -> str:
    try:
        return uuid.UUID(text).hex
    except ValueError:
        raise InvalidRequest(f"request_id must be a UUID, for example {uuid.uuid4()}; got {text[:40]!r}") from None


def parse_run(text: str) -> str:
    """A run's name; raises InvalidRequest."""
    if not _RUN.fullmatch(text):
        raise InvalidRequest(f"run must be 1 to 128 letters, digits or ._/- ; got {text[:40]!r}")
    return text


def _parse_verifier(name: str, verifiers: dict[str, VerifierInfo]) -> VerifierInfo:
    if not name:
        raise InvalidRequest(f"verifier is required; known ones are {', '.join(verifiers) or 'none'}")
    if (info := verifiers.get(name)) is None:
        raise NotFound(f"there is no verifier {name[:80]!r}; known ones are {', '.join(verifiers) or 'none'}")
    return info


def _parse_payload(payload: bytes) -> str:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"the payload has {len(payload)} bytes, {MAX_PAYLOAD_BYTES} are allowed")
    try:
        return canonical_json(payload.decode())
    except ValueError as error:
        raise InvalidRequest(f"the payload must be a JSON object in UTF-8: {error}") from None


def _parse_answers(answers: list[str]) -> tuple[str, ...]:
    if not 1 <= len(answers) <= MAX_ANSWERS:
        raise InvalidRequest(f"a job needs 1 to {MAX_ANSWERS} answers, got {len(answers)}")
    longest = max(map(len, answers))
    if longest > MAX_ANSWER_CHARACTERS or sum(map(len, answers)) > MAX_ANSWERS_CHARACTERS:
        raise InvalidRequest(
            f"answers may have {MAX_ANSWER_CHARACTERS} characters each and {MAX_ANSWERS_CHARACTERS} together"
        )
    return tuple(answers)


def _parse_deadline(seconds: float) -> float:
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_DEADLINE_SECONDS:
        raise InvalidRequest(f"deadline_seconds must be 0 to {MAX_DEADLINE_SECONDS:.0f}, got {seconds}")
    return seconds


def parse_name(name: str) -> str:
    """The id in verifications/{verification}; raises InvalidRequest."""
    if (match := _NAME.fullmatch(name)) is None:
        raise InvalidRequest(f"name must be verifications/ and 32 hexadecimal digits, got {name[:60]!r}")
    return match[1]


def parse_code(request: pb.RunCodeRequest, most_seconds: float, most_bytes: int) -> CodeRequest:
    """Limits are refused, never silently lowered."""
    if not request.code or len(request.code) > MAX_CODE_CHARACTERS:
        raise InvalidRequest(f"code must have 1 to {MAX_CODE_CHARACTERS} characters, got {len(request.code)}")
    seconds = request.timeout_seconds or min(_DEFAULT_CODE_SECONDS, most_seconds)
    if not math.isfinite(seconds) or not 0 < seconds <= most_seconds:
        raise InvalidRequest(f"timeout_seconds must be 0 to {most_seconds:.0f}, got {request.timeout_seconds}")
    memory = request.memory_bytes or min(_DEFAULT_CODE_BYTES, most_bytes)
    if not _LEAST_CODE_BYTES <= memory <= most_bytes:
        raise InvalidRequest(f"memory_bytes must be {_LEAST_CODE_BYTES} to {most_bytes}, got {memory}")
    return CodeRequest(code=request.code, wall_seconds=seconds, memory_bytes=memory)


def to_verification(job: Job) -> verification_pb2.Verification:
    """The stored job as a message."""
    return verification_pb2.Verification(
        name=f"verifications/{job.job_id}",
        run=job.run,
        verifier=job.verifier,
        state=verification_pb2.Verification.State.Value(f"STATE_{job.state.upper()}"),
        grades=[_to_grade(grade) for grade in job.grades],
        attempts=job.attempts,
        content_hash=job.content_hash,
        cached=job.cached,
        error=job.error,
        queue_seconds=job.queue_seconds,
        run_seconds=job.run_seconds,
    )


def _to_grade(grade: Grade) -> verification_pb2.Grade:
    return verification_pb2.Grade(
        outcome=verification_pb2.Grade.Outcome.Value(f"OUTCOME_{grade.outcome.upper()}"),
        reward=grade.reward,
        figures=[verification_pb2.Figure(name=name, value=value) for name, value in grade.figures.items()],
        message=grade.message,
    )


def to_code_response(result: CodeResult) -> pb.RunCodeResponse:
    """The end of a run as a message."""
    return pb.RunCodeResponse(
        status=pb.RunCodeResponse.Status.Value(f"STATUS_{result.status.upper()}"),
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        output_truncated=result.output_truncated,
        wall_seconds=result.wall_seconds,
        cpu_seconds=result.cpu_seconds,
    )
