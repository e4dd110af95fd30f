"""What travels through the queue: prompts out, graded groups back, as compact JSON."""

import json
from dataclasses import dataclass, field
from typing import Any, Self

KNOWN_OUTCOMES = ("scored", "invalid")
"""Outcomes that are rewards; every other reward is unknown, never 0."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as the trainer issues it."""

    index: int
    token_ids: list[int]
    truth: dict[str, Any]
    """Payload of the verifier."""
    version: int
    """Weight version at issue: no sample may be older."""
    issued_at: float
    """Unix time in seconds."""
    traceparent: str = ""
    problem: int = 0
    """Number of the task's problem that it asks."""
    stratum: str = ""
    """Kind of that problem."""

    def to_bytes(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        return cls(**json.loads(raw))


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` were generated under `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One answer: ids, the sampler's log-probabilities, and the weight versions of all tokens."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[Span]
    replica: str = ""

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token; -1 when it has none."""
        return min((span.version for span in self.versions), default=-1)


@dataclass(frozen=True)
class Grade:
    """Verdict on one answer."""

    outcome: str
    """scored, invalid, timeout, infra_error or cancelled."""
    reward: float
    figures: dict[str, float] = field(default_factory=dict)
    message: str = ""

    @property
    def known(self) -> bool:
        return self.outcome in KNOWN_OUTCOMES


@dataclass(frozen=True)
class Generation:
    """Samples of one prompt, stored before they are graded."""

    samples: list[Sample]
    started_at: float
    ended_at: float

    def to_bytes(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        document = json.loads(raw)
        return cls(_samples(document["samples"]), document["started_at"], document["ended_at"])


@dataclass(frozen=True)
class Group:
    """A graded group: prompt, its samples and their grades."""

    index: int
    version: int
    """Weight version at issue."""
    token_ids: list[int]
    samples: list[Sample]
    grades: list[Grade]
    issued_at: float
    claimed_at: float
    generate_seconds: float
    verify_seconds: float
    emitted_at: float
    worker: str
    traceparent: str = ""
    problem: int = 0
    stratum: str = ""
    provisional: bool = False
    """Its rewards are a surrogate's; those that count may come later."""
    entry: str = ""
    """Stream entry, known to the trainer only."""

    def to_bytes(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def from_bytes(cls, raw: bytes, entry: str = "") -> Self:
        document = json.loads(raw)
        document |= {
            "samples": _samples(document["samples"]),
            "grades": [Grade(**grade) for grade in document["grades"]],
            "entry": entry,
        }
        return cls(**document)


def _samples(documents: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(**{**one, "versions": [Span(**span) for span in one["versions"]]}) for one in documents]


def _dump(document: dict[str, Any]) -> bytes:
    # vars, not asdict: that copies every token, which cost more than all of Redis.
    return json.dumps(document, separators=(",", ":"), default=vars).encode()
