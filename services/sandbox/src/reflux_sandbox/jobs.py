"""Verification jobs as values: what is asked, how it may end, and the key under which equal work is equal."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Outcome = Literal["scored", "invalid", "timeout", "infra_error", "cancelled"]
REWARDS: tuple[Outcome, ...] = ("scored", "invalid")
"""Outcomes that say something about the answer; the others mean that the reward is unknown, never that it is 0."""

Fidelity = Literal["rule", "surrogate", "full"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

State = Literal["queued", "running", "ended"]


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Verdict on one answer."""

    outcome: Outcome
    reward: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to grade. `payload` is the JSON text of the problem, canonical (sorted keys, no spaces)."""

    verifier: str
    version: str
    fidelity: Fidelity
    payload: str
    answers: tuple[str, ...]
    deadline_seconds: float
    """From creation to the end, queueing included."""
    run: str
    traceparent: str
    canonical: tuple[str, ...] = ()
    """What each answer is equal to (`keys.AnswerKeys`); empty: every answer to itself only."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A job that this service holds a lease on."""

    job_id: str
    verifier: str
    payload: str
    answers: tuple[str, ...]
    run: str
    traceparent: str
    attempt: int
    seconds_left: float
    """Until the deadline, at the time of the claim."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The stored job as a caller sees it."""

    job_id: str
    run: str
    verifier: str
    state: State
    grades: tuple[Grade, ...]
    attempts: int
    content_hash: str
    cached: bool
    error: str
    queue_seconds: float
    run_seconds: float


def canonical_json(text: str) -> str:
    """One spelling for equal documents. Raises ValueError when `text` is not a JSON object of finite numbers."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("the document must be a JSON object")
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def answer_keys(spec: JobSpec) -> list[str]:
    """One key per answer, for the result cache and single flight: all that can change its grade, and nothing else."""
    return [_digest([spec.verifier, spec.version, spec.payload, text]) for text in spec.canonical or spec.answers]


def content_hash(spec: JobSpec) -> str:
    """Key of a whole job: of its answers in their order."""
    return _digest(answer_keys(spec))


def _digest(parts: list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()[:32]


def unknown(outcome: Outcome, count: int, message: str) -> tuple[Grade, ...]:
    """`count` grades that say why there is no reward."""
    assert outcome not in REWARDS, "a reward needs a verdict"
    return tuple(Grade(outcome=outcome, message=message) for _ in range(count))


def worth_keeping(grades: tuple[Grade, ...]) -> bool:
    """Whether equal work may be answered with these grades: only when every one is a reward."""
    return bool(grades) and all(grade.outcome in REWARDS for grade in grades)


def grades_to_json(grades: tuple[Grade, ...]) -> str:
    """Compact rows [outcome, reward, figures, message]."""
    rows = [[grade.outcome, grade.reward, dict(grade.figures), grade.message] for grade in grades]
    return json.dumps(rows, allow_nan=False, separators=(",", ":"))


def grades_from_json(text: str) -> tuple[Grade, ...]:
    """Inverse of `grades_to_json`."""
    rows: list[list[Any]] = json.loads(text)
    return tuple(Grade(outcome=row[0], reward=row[1], figures=row[2], message=row[3]) for row in rows)


def parse_child_grades(rows: object, count: int) -> tuple[Grade, ...]:
    """Grades from a child's frame, which is not trusted. Raises ValueError unless `count` are well-formed."""
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"the verifier did not return {count} grades")
    grades = []
    for row in rows:
        outcome, reward = row["outcome"], float(row["reward"])
        if outcome not in (*REWARDS, "infra_error") or not abs(reward) < float("inf"):
            raise ValueError(f"the verifier returned outcome {outcome!r} with reward {reward}")
        figures = {str(key): float(value) for key, value in row["figures"].items()}
        grades.append(Grade(outcome=outcome, reward=reward, figures=figures, message=str(row["message"])))
    return tuple(grades)
