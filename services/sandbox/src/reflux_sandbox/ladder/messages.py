"""Parses ladder requests into values, and turns ladders and their events into messages."""

import hashlib
import time
from dataclasses import replace
from typing import Any

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1 import sandbox_service_pb2
from reflux.sandbox.v1.verification_pb2 import Grade as GradeMessage
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_kit.errors import InvalidRequest
from reflux_sandbox.creation import parse_group, parse_policy_version
from reflux_sandbox.jobs import Grade
from reflux_sandbox.ladder.calibration import TrustLimits
from reflux_sandbox.ladder.door import JobDoor, job_request, ladder_job_id
from reflux_sandbox.ladder.release import RUNGS, Rung
from reflux_sandbox.ladder.runs import RunState
from reflux_sandbox.ladder.selection import ValuePolicy
from reflux_sandbox.ladder.state import (
    Basis,
    Corrected,
    Event,
    LadderSpec,
    LadderState,
    Released,
    SettledSample,
    Unresolved,
)
from reflux_sandbox.ladder.value import Estimator
from reflux_sandbox.messages import parse_run, parse_uuid
from reflux_sandbox.verification_messages import to_grade

MOST_SAMPLES = 1024
_NAME = "ladders/"
_FIDELITY: dict[Rung, Any] = {rung: Verification.Fidelity.Value(f"FIDELITY_{rung.upper()}") for rung in RUNGS}
_RUNG: dict[int, Rung] = {number: rung for rung, number in _FIDELITY.items()}
_ESTIMATOR: dict[int, Estimator] = {
    pb.LadderPolicy.ESTIMATOR_UNSPECIFIED: "grpo",
    pb.LadderPolicy.ESTIMATOR_GRPO: "grpo",
    pb.LadderPolicy.ESTIMATOR_CENTRED: "centred",
}
_BASIS: dict[Basis, Any] = {
    "full": pb.SettledSample.BASIS_FULL,
    "forecast": pb.SettledSample.BASIS_FORECAST,
    "released": pb.SettledSample.BASIS_RELEASED,
    "unknown": pb.SettledSample.BASIS_UNKNOWN,
}


def _fidelity(rung: Rung | None) -> Any:
    return _FIDELITY[rung] if rung else Verification.FIDELITY_UNSPECIFIED


async def parse_ladder(request: pb.CreateLadderRequest, door: JobDoor) -> LadderSpec:
    """Raises InvalidRequest or NotFound for what can never be graded, before anything is stored."""
    request_id, run, group = parse_uuid(request.request_id), parse_run(request.run), parse_group(request.group)
    if not group:
        raise InvalidRequest("group is required: the prompt's name, for example")
    samples = list(request.sample_ids)
    if not 1 <= len(samples) == len(request.answers) <= MOST_SAMPLES or len(set(samples)) != len(samples):
        raise InvalidRequest(
            f"a ladder needs 1 to {MOST_SAMPLES} answers and as many different sample ids, got {len(request.answers)} "
            f"answers and {len(samples)} ids ({len(set(samples))} different)"
        )
    policy = request.policy
    verifiers = _verifiers(request)
    trust, value = _trust(policy), _value(policy)
    spec = LadderSpec(
        ladder_id=hashlib.blake2b(f"{run}\0{request_id}".encode(), digest_size=16).hexdigest(),
        run=run,
        group=group,
        payload=_text(request.payload),
        answers=tuple(request.answers),
        sample_ids=tuple(samples),
        policy_version=parse_policy_version(request.policy_version),
        verifiers=verifiers,
        release=_release(policy.release, verifiers),
        kinds=tuple(range(len(samples))),
        deadline_seconds=request.deadline_seconds,
        trust=trust,
        value=value,
        selective=policy.value_of_information if policy.HasField("value_of_information") else True,
        audit_seed=policy.audit_seed,
        traceparent=request.traceparent,
        created=time.time(),
    )
    return await _checked(spec, door)


async def _checked(spec: LadderSpec, door: JobDoor) -> LadderSpec:
    """Parses the job of every rung, so that none is refused later; fills in which answers are equal."""
    for rung in spec.below:
        _is_of(rung, door.parse(job_request(spec, rung)).fidelity)
    whole = door.parse(_all_in_full(spec))
    _is_of("full", whole.fidelity)
    return replace(spec, kinds=await door.kinds(whole), payload=whole.payload)


def _all_in_full(spec: LadderSpec) -> sandbox_service_pb2.CreateVerificationRequest:
    request = job_request(spec, 0)
    del request.answers[:], request.sample_ids[:]
    request.answers.extend(spec.answers)
    request.sample_ids.extend(spec.sample_ids)
    return request


def _is_of(rung: Rung, fidelity: Rung) -> None:
    if rung != fidelity:
        raise InvalidRequest(f"the verifier of the rung {rung} is of fidelity {fidelity}")


def _text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the payload must be a JSON object in UTF-8: {error}") from None


def _verifiers(request: pb.CreateLadderRequest) -> dict[Rung, str]:
    named: dict[Rung, str] = {
        "rule": request.rule_verifier,
        "surrogate": request.surrogate_verifier,
        "full": request.full_verifier,
    }
    if not named["full"]:
        raise InvalidRequest("full_verifier is required; without a full rung there is nothing to correct by")
    return {rung: name for rung, name in named.items() if name}


def _release(number: int, verifiers: dict[Rung, str]) -> Rung:
    rung = _RUNG.get(number, "surrogate")
    if rung not in verifiers:
        raise InvalidRequest(f"the ladder has no rung {rung} to be released on; it has {', '.join(verifiers)}")
    return rung


def _trust(policy: pb.LadderPolicy) -> TrustLimits:
    given = {
        name: getattr(policy, f"trust_{name}")
        for name in ("enter", "leave", "least_pairs")
        if policy.HasField(f"trust_{name}")  # type: ignore[arg-type]
    }
    try:
        return TrustLimits(**given)
    except ValueError as error:
        raise InvalidRequest(f"policy: {error}") from None


def _value(policy: pb.LadderPolicy) -> ValuePolicy:
    names = {"forecast_least_pairs": "least_pairs"}
    fields = ("tolerated_error", "audit_share", "forecast_least_pairs", "max_lag", "budget_cpu_seconds", "in_flight")
    given = {names.get(name, name): getattr(policy, name) for name in fields if policy.HasField(name)}  # type: ignore
    try:
        return ValuePolicy(estimator=_ESTIMATOR[policy.estimator], **given)
    except (ValueError, KeyError) as error:
        raise InvalidRequest(f"policy: {error}") from None


def parse_ladder_name(name: str) -> str:
    """The id in ladders/{ladder}; raises InvalidRequest."""
    ladder_id = name.removeprefix(_NAME)
    if name == ladder_id or len(ladder_id) != 32 or not set(ladder_id) <= set("0123456789abcdef"):
        raise InvalidRequest(f"name must be {_NAME} and 32 hexadecimal digits, got {name[:60]!r}")
    return ladder_id


def _job_name(spec: LadderSpec, kind: int) -> str:
    return f"verifications/{ladder_job_id(spec, kind)}"


def to_ladder(spec: LadderSpec, state: LadderState) -> pb.Ladder:
    """The ladder as a message."""
    progress = "SETTLED" if state.settled else "RELEASED" if state.released_on else "CLIMBING"
    return pb.Ladder(
        name=f"{_NAME}{spec.ladder_id}",
        run=spec.run,
        group=spec.group,
        state=pb.Ladder.State.Value(f"STATE_{progress}"),
        policy_version=spec.policy_version,
        released_on=_fidelity(state.released_on),
        audited=spec.audited,
        samples=[_to_sample(spec, state, sample) for sample in range(len(spec.answers))],
        create_time=spec.created,
        release_time=state.released_at,
    )


def _to_sample(spec: LadderSpec, state: LadderState, sample: int) -> pb.LadderSample:
    kind = spec.kinds[sample]
    end = state.full.get(kind)
    below = state.grades.get(state.released_on) if state.released_on else None
    released = below[sample] if below else end.grade if end and state.released_on else None
    why = state.skipped.get(kind, "")
    return pb.LadderSample(
        sample_id=spec.sample_ids[sample],
        released=_grade(released),
        full=_grade(end.grade if end else None),
        verification=_job_name(spec, kind) if kind in state.started else "",
        skipped=why,
        settled_reward=state.rewards[kind] if state.settled else None,
    )


def _grade(grade: Grade | None) -> GradeMessage | None:
    return None if grade is None else to_grade(grade)


def to_event(spec: LadderSpec, event: Event) -> bytes:
    """An event as it is stored and streamed, but for the resume token."""
    message = pb.WatchLaddersResponse(
        ladder=f"{_NAME}{spec.ladder_id}", group=spec.group, policy_version=spec.policy_version
    )
    if isinstance(event, Released):
        message.release.CopyFrom(
            pb.LadderRelease(
                fidelity=_FIDELITY[event.rung],
                sample_ids=spec.sample_ids,
                grades=[to_grade(grade) for grade in event.grades],
                is_final=event.final,
            )
        )
    elif isinstance(event, Corrected):
        message.correction.CopyFrom(
            pb.LadderCorrection(
                sample_id=spec.sample_ids[event.sample],
                provisional_reward=event.provisional,
                final_reward=event.final,
                provisional_fidelity=_FIDELITY[event.provisional_rung],
                final_fidelity=_FIDELITY["full"],
                verification=_job_name(spec, event.kind),
            )
        )
    elif isinstance(event, Unresolved):
        message.unresolved.CopyFrom(
            pb.LadderUnresolved(
                sample_id=spec.sample_ids[event.sample],
                outcome=GradeMessage.Outcome.Value(f"OUTCOME_{event.grade.outcome.upper()}"),
                verification=_job_name(spec, event.kind),
                message=event.grade.message,
            )
        )
    else:
        rows = zip(spec.sample_ids, event.samples, strict=True)
        message.settlement.CopyFrom(
            pb.LadderSettlement(
                released_on=_fidelity(event.released_on),
                samples=[_to_settled(sample_id, row) for sample_id, row in rows],
            )
        )
    return message.SerializeToString()


def _to_settled(sample_id: str, row: SettledSample) -> pb.SettledSample:
    return pb.SettledSample(
        sample_id=sample_id,
        provisional_reward=row.provisional,
        reward=row.reward,
        basis=_BASIS[row.basis],
        skipped=row.skipped,
    )


def to_calibration(run: str, known: RunState) -> pb.GetCalibrationResponse:
    """The calibration of a run as a message."""
    figures, counters = known.figures, known.row.counters
    created, settled = counters.get("groups_created", 0.0), counters.get("groups_settled", 0.0)
    audited = counters.get("audited_groups", 0.0)
    skips = {name.removeprefix("skipped:"): count for name, count in counters.items() if name.startswith("skipped:")}
    return pb.GetCalibrationResponse(
        run=run,
        trusted=known.row.trusted,
        pairs=figures.pairs,
        effective_pairs=figures.effective_pairs,
        bias=figures.bias,
        rank_correlation=figures.rank_correlation,
        coverage=figures.coverage,
        interval_coverage=figures.interval_coverage,
        spread=figures.spread,
        groups_open=int(created - settled),
        groups_released=int(counters.get("groups_released", 0.0)),
        groups_settled=int(settled),
        cpu_seconds=counters.get("cpu_seconds", 0.0),
        cpu_seconds_saved=counters.get("cpu_seconds_saved", 0.0),
        advantage_error=counters.get("advantage_error", 0.0) / audited if audited else float("nan"),
        audited_groups=int(audited),
        skipped=[pb.SkipCount(reason=why, count=int(count)) for why, count in sorted(skips.items())],
    )
