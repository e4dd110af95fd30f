"""Parses requests for new verifications. All that can never be graded is refused here, in bounded time."""

import math
import re
from collections.abc import Callable, Mapping

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import verification_pb2
from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.jobs import EXTERNAL, Fidelity, JobSpec, canonical_json
from reflux_sandbox.messages import parse_run, parse_uuid

MAX_BATCH = 1000
MAX_PAYLOAD_BYTES = 1 << 20
MAX_ANSWERS = 4096
MAX_ANSWER_CHARACTERS = 1 << 16
MAX_ANSWERS_CHARACTERS = 1 << 20
MAX_DEADLINE_SECONDS = 7 * 86400.0
MAX_PRIORITY = 1000.0
MAX_COST_SECONDS = 1e9
MAX_POLICY_VERSION = (1 << 53) - 1
"""Whole numbers above it are not exact in Redis scripts."""
MAX_SAMPLE_ID_CHARACTERS = 200

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_GROUP = re.compile(r"[^\x00-\x1f\x7f]{0,128}")
_EXTERNAL = re.compile(rf"{EXTERNAL}[A-Za-z0-9._-]{{1,100}}")
_VERSION = re.compile(r"[A-Za-z0-9._:+/-]{0,100}")
_DEFAULT_DEADLINE: dict[Fidelity, float] = {"rule": 60.0, "surrogate": 300.0, "full": 3600.0}
_FIDELITIES: dict[int, Fidelity] = {
    verification_pb2.Verification.FIDELITY_RULE: "rule",
    verification_pb2.Verification.FIDELITY_SURROGATE: "surrogate",
    verification_pb2.Verification.FIDELITY_FULL: "full",
}


class CreationParser:
    """Knows what is installed; equal payloads of one batch are parsed once."""

    def __init__(self, verifiers: Mapping[str, VerifierInfo], queue_of: Callable[[VerifierInfo], str]) -> None:
        self._verifiers = verifiers
        self._queue_of = queue_of
        self._payloads: dict[bytes, str] = {}

    def parse(self, request: pb.CreateVerificationRequest) -> JobSpec:
        """Raises InvalidRequest for anything that can never be graded, NotFound for a verifier that is not installed,
        WrongState for another version or fidelity than the installed one's."""
        request_id, run = parse_uuid(request.request_id), parse_run(request.run)
        info = self._verifier(request)
        answers = _answers(list(request.answers))
        return JobSpec(
            verifier=info.name,
            version=info.version,
            fidelity=info.fidelity,
            queue=info.name if info.name.startswith(EXTERNAL) else self._queue_of(info),
            payload=self._payload(request.payload),
            answers=answers,
            deadline_seconds=parse_deadline(request.deadline_seconds) or default_deadline(info.fidelity),
            run=run,
            traceparent=request.traceparent if _TRACEPARENT.fullmatch(request.traceparent) else "",
            request_id=request_id,
            priority=parse_number("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY),
            group=parse_group(request.group),
            policy_version=parse_policy_version(request.policy_version),
            sample_ids=_sample_ids(list(request.sample_ids), len(answers)),
            cost_hint_seconds=parse_number("cost_hint_seconds", request.cost_hint_seconds, 0.0, MAX_COST_SECONDS),
        )

    def _verifier(self, request: pb.CreateVerificationRequest) -> VerifierInfo:
        name, version, fidelity = request.verifier, request.version, _FIDELITIES.get(request.fidelity)
        if name.startswith(EXTERNAL):
            if not _EXTERNAL.fullmatch(name) or not _VERSION.fullmatch(version):
                raise InvalidRequest(
                    f"an external verifier is {EXTERNAL} and letters, digits or ._- ; got {name[:60]!r}"
                )
            return VerifierInfo(name, version, fidelity or "full", trusted=False, cost_seconds=0.0)
        info = self.installed(name)
        if version not in ("", info.version):
            raise WrongState(
                f"{name} is installed as version {info.version}, not {version[:40]!r}", version=info.version
            )
        if fidelity not in (None, info.fidelity):
            raise WrongState(f"{name} is of fidelity {info.fidelity}, not {fidelity}", fidelity=info.fidelity)
        return info

    def installed(self, name: str) -> VerifierInfo:
        """The verifier of this name. Raises InvalidRequest for none, NotFound for another."""
        known = ", ".join(self._verifiers) or "none"
        if not name:
            raise InvalidRequest(f"verifier is required; known ones are {known}")
        if (info := self._verifiers.get(name)) is None:
            raise NotFound(f"there is no verifier {name[:80]!r}; known ones are {known}")
        return info

    def _payload(self, payload: bytes) -> str:
        if payload not in self._payloads:
            self._payloads[payload] = _canonical(payload)
        return self._payloads[payload]


def parse_batch(request: pb.BatchCreateVerificationsRequest, parser: CreationParser) -> list[JobSpec]:
    """All requests of a batch; an error names the request by its number."""
    if not 1 <= len(request.requests) <= MAX_BATCH:
        raise InvalidRequest(f"a batch has 1 to {MAX_BATCH} requests, got {len(request.requests)}")
    specs = []
    for number, each in enumerate(request.requests):
        try:
            specs.append(parser.parse(each))
        except (InvalidRequest, NotFound, WrongState) as error:
            raise type(error)(f"requests[{number}]: {error}", **error.metadata) from None
    return specs


def _canonical(payload: bytes) -> str:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"the payload has {len(payload)} bytes, {MAX_PAYLOAD_BYTES} are allowed")
    try:
        return canonical_json(payload.decode())
    except ValueError as error:
        raise InvalidRequest(f"the payload must be a JSON object in UTF-8: {error}") from None


def _answers(answers: list[str]) -> tuple[str, ...]:
    if not 1 <= len(answers) <= MAX_ANSWERS:
        raise InvalidRequest(f"a job needs 1 to {MAX_ANSWERS} answers, got {len(answers)}")
    longest = max(map(len, answers))
    if longest > MAX_ANSWER_CHARACTERS or sum(map(len, answers)) > MAX_ANSWERS_CHARACTERS:
        raise InvalidRequest(
            f"answers may have {MAX_ANSWER_CHARACTERS} characters each and {MAX_ANSWERS_CHARACTERS} together"
        )
    return tuple(answers)


def _sample_ids(ids: list[str], answers: int) -> tuple[str, ...]:
    if ids and len(ids) != answers:
        raise InvalidRequest(f"sample_ids must be empty or one per answer, got {len(ids)} for {answers} answers")
    if any(not 1 <= len(each) <= MAX_SAMPLE_ID_CHARACTERS for each in ids):
        raise InvalidRequest(f"a sample id has 1 to {MAX_SAMPLE_ID_CHARACTERS} characters")
    return tuple(ids)


def default_deadline(fidelity: Fidelity) -> float:
    """Seconds for a job whose creator names no deadline."""
    return _DEFAULT_DEADLINE[fidelity]


def parse_deadline(seconds: float) -> float:
    """A deadline, 0.0 when none is given; raises InvalidRequest."""
    return parse_number("deadline_seconds", seconds, 0.0, MAX_DEADLINE_SECONDS)


def parse_number(name: str, value: float, least: float, most: float) -> float:
    """A finite number within bounds; raises InvalidRequest."""
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(f"{name} must be {least:g} to {most:g}, got {value}")
    return value


def parse_group(text: str) -> str:
    """A group's name or ""; raises InvalidRequest."""
    if not _GROUP.fullmatch(text):
        raise InvalidRequest(f"group must be at most 128 characters without control characters, got {text[:40]!r}")
    return text


def parse_policy_version(version: int) -> int:
    """A version; raises InvalidRequest."""
    if version > MAX_POLICY_VERSION:
        raise InvalidRequest(f"policy versions end at {MAX_POLICY_VERSION}, got {version}")
    return version
