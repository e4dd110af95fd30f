"""Verification jobs as values: what is asked, how it may end, and the key under which equal work is equal."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Outcome = Literal["scored", "invalid", "timeout", "infra_error", "cancelled"]
REWARDS: tuple[Outcome, ...] = ("scored", "invalid")
"""Outcomes that say something about the answer; the others mean that the reward is unknown, never that it is 0."""

Fidelity = Literal["rule", "surrogate", "full"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

EXTERNAL = "external/"
"""Beginning of the name of a verifier whose jobs wait for an outside caller; such a name is also its queue."""
REMOTE = "remote"
"""Queue of the verifiers that run outside this machine."""

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
    queue: str = ""
    """Where it waits; empty: in the queue of its fidelity."""
    request_id: str = ""
    """Makes creation safe to repeat within a run; empty: a new one."""
    priority: float = 0.0
    """Larger goes first; one unit is worth `StoreLimits.priority_seconds` of waiting."""
    group: str = ""
    policy_version: int = 0
    sample_ids: tuple[str, ...] = ()
    cost_hint_seconds: float = 0.0

    @property
    def external(self) -> bool:
        """Whether an outside caller completes it."""
        return self.queue.startswith(EXTERNAL)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A job that somebody holds a lease on."""

    job_id: str
    owner: str
    """Who: a service, or the token of an outside caller."""
    verifier: str
    payload: str
    answers: tuple[str, ...]
    """The distinct ones to run; the others have a grade, or another job is at work on them."""
    numbers: tuple[int, ...]
    """Their numbers among the distinct answers of the job."""
    run: str
    traceparent: str
    attempt: int
    seconds_left: float
    """Until the deadline, at the time of the claim."""
    version: str = ""
    """Of the verifier that the grade is kept for; empty: any."""


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """What came of a lease: a grade per claimed answer, or none and an `outcome` for all that have no grade."""

    job: Claimed
    grades: tuple[Grade, ...] = ()
    outcome: Outcome | None = None
    message: str = ""
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.outcome not in REWARDS, "a reward needs a verdict"
        assert self.outcome or len(self.grades) == len(self.job.answers), "a grade per claimed answer"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The stored job as a caller sees it."""

    job_id: str
    run: str
    verifier: str
    version: str
    fidelity: Fidelity
    state: State
    answers: int
    """How many answers it has."""
    grades: tuple[Grade, ...]
    """One per answer when it has ended, else none."""
    partial: Mapping[int, Grade]
    """Grades that are known before the end, by number of the answer."""
    attempts: int
    content_hash: str
    cached: bool
    """Every grade came from the cache or from another job."""
    error: str
    queue_seconds: float
    run_seconds: float
    priority: float
    group: str
    policy_version: int
    sample_ids: tuple[str, ...]
    cost_hint_seconds: float
    cpu_seconds: float
    """Processor seconds of all attempts; wall-clock seconds of an attempt that was killed."""
    executed: int
    """Distinct answers that this job ran itself."""
    progress: float
    created: float
    """Seconds since 1970, as the two below; 0.0 for what has not happened."""
    deadline: float
    ended: float
    heartbeat_age_seconds: float
    reason: str
    """Why it is a dead letter."""
    token: str = field(repr=False)
    """Right to complete it, when its verifier is external."""


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which jobs of a run to cancel: what is given must hold."""

    run: str
    group: str = ""
    older_than: int = 0
    """Policy versions below it; 0: any."""


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
    problem = payload_hash(spec.payload)
    return [_digest([spec.verifier, spec.version, problem, text]) for text in spec.canonical or spec.answers]


def payload_hash(payload: str) -> str:
    """Address under which equal payloads are stored once."""
    return _digest([payload])


def content_hash(keys: Sequence[str]) -> str:
    """Key of a whole job: of its answers in their order."""
    return _digest(keys)


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()[:32]


def grade_to_json(grade: Grade) -> str:
    """A compact row [outcome, reward, figures, message]."""
    row = [grade.outcome, grade.reward, dict(grade.figures), grade.message]
    return json.dumps(row, allow_nan=False, separators=(",", ":"))


def grade_from_json(text: bytes) -> Grade:
    """Inverse of `grade_to_json`."""
    outcome, reward, figures, message = json.loads(text)
    return Grade(outcome=outcome, reward=reward, figures=figures, message=message)


def parse_child_grades(rows: object, count: int) -> tuple[Grade, ...]:
    """Grades from a child's frame, which is not trusted: text without a spelling in UTF-8 becomes question marks, as no
    message could carry it. Raises ValueError unless `count` are well-formed."""
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"the verifier did not return {count} grades")
    grades = []
    for row in rows:
        outcome, reward = row["outcome"], float(row["reward"])
        if outcome not in (*REWARDS, "infra_error") or not abs(reward) < float("inf"):
            raise ValueError(f"the verifier returned outcome {outcome!r} with reward {reward}")
        figures = {_speakable(key): float(value) for key, value in row["figures"].items()}
        if not all(map(math.isfinite, figures.values())):
            raise ValueError("the verifier returned a figure that is not finite")
        grades.append(Grade(outcome=outcome, reward=reward, figures=figures, message=_speakable(row["message"])))
    return tuple(grades)


def _speakable(text: object) -> str:
    return str(text).encode(errors="replace").decode()
