"""One group on the ladder as values: what was asked, what is known of it, and what happened to it. Pure."""

import json
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from reflux_sandbox.jobs import Grade
from reflux_sandbox.ladder.calibration import TrustLimits
from reflux_sandbox.ladder.release import Rung, is_audited
from reflux_sandbox.ladder.selection import ValuePolicy

Basis = Literal["full", "forecast", "released", "unknown"]
"""Where the reward that counts in the end comes from."""
FULL: Rung = "full"


@dataclass(frozen=True, kw_only=True)
class LadderSpec:
    """What was asked. `payload` is canonical JSON, as in a verification job."""

    ladder_id: str
    run: str
    group: str
    payload: str
    answers: tuple[str, ...]
    sample_ids: tuple[str, ...]
    policy_version: int
    verifiers: Mapping[Rung, str]
    """Verifier of each rung; `full` is always there."""
    release: Rung
    kinds: tuple[int, ...]
    """Number of the different answer that each sample gave; equal answers are verified once."""
    deadline_seconds: float = 0.0
    trust: TrustLimits = field(default_factory=TrustLimits)
    value: ValuePolicy = field(default_factory=ValuePolicy)
    selective: bool = True
    """Whether full verifications are chosen by their value."""
    audit_seed: int = 0
    traceparent: str = ""
    created: float = 0.0
    """Unix time in seconds."""

    @cached_property
    def audited(self) -> bool:
        return is_audited(self.audit_seed, self.run, self.group, self.value.audit_share)

    @property
    def cheap(self) -> Rung | None:
        """The rung that is compared with the full one: that of the release, or the highest below full."""
        if self.release != FULL:
            return self.release
        return next((rung for rung in ("surrogate", "rule") if rung in self.verifiers), None)

    @property
    def below(self) -> list[Rung]:
        """Rungs to climb before the full one, in their order."""
        order: list[Rung] = ["rule"] if self.cheap == "rule" else ["rule", "surrogate"]
        return [rung for rung in order if rung in self.verifiers]

    def next_rung(self, graded: Container[Rung]) -> Rung | None:
        """The lowest rung below full that is not graded yet."""
        return next((rung for rung in self.below if rung not in graded), None)

    @property
    def count(self) -> int:
        """Different answers."""
        return max(self.kinds) + 1

    def samples_of(self, kind: int) -> list[int]:
        """Positions of the samples that gave an answer."""
        return [position for position, each in enumerate(self.kinds) if each == kind]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        row = json.loads(text)
        row |= {name: tuple(row[name]) for name in ("answers", "sample_ids", "kinds")}
        return cls(**row | {"trust": TrustLimits(**row["trust"]), "value": ValuePolicy(**row["value"])})


@dataclass(frozen=True, kw_only=True)
class FullEnd:
    """How the full verification of one answer ended."""

    grade: Grade
    cpu_seconds: float
    """Of its own attempts; 0 when the cache had the grade."""


@dataclass(frozen=True, kw_only=True)
class LadderState:
    """What is known. Keys of the mappings are numbers of different answers."""

    grades: Mapping[Rung, tuple[Grade, ...]] = field(default_factory=dict)
    """Of the rungs below full that ended: one per sample."""
    started: frozenset[int] = frozenset()
    """Answers whose full verification was asked for."""
    full: Mapping[int, FullEnd] = field(default_factory=dict)
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Why the full verification will never be."""
    reserved: Mapping[int, float] = field(default_factory=dict)
    """CPU seconds of the step's budget that open verifications hold."""
    released_on: Rung | None = None
    released_at: float = 0.0
    selected: bool = False
    """Whether the full verifications were up to their value when the group was released."""
    predicted: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Intervals that were forecast at the release."""
    settled: bool = False
    rewards: tuple[float | None, ...] = ()
    """When it is settled: the reward that counts, one per different answer; None is unknown."""

    @property
    def open(self) -> set[int]:
        """Asked for and not ended."""
        return {kind for kind in self.started if kind not in self.full and kind not in self.skipped}

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"started": sorted(self.started)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        row = json.loads(text)
        return cls(
            **row
            | {
                "grades": {rung: tuple(Grade(**each) for each in grades) for rung, grades in row["grades"].items()},
                "started": frozenset(row["started"]),
                "full": {int(kind): _full_end(each) for kind, each in row["full"].items()},
                "predicted": {int(kind): tuple(each) for kind, each in row["predicted"].items()},
                "rewards": tuple(row["rewards"]),
            }
            | {name: {int(kind): each for kind, each in row[name].items()} for name in ("skipped", "reserved")}
        )


def _full_end(row: Mapping[str, Any]) -> FullEnd:
    return FullEnd(grade=Grade(**row["grade"]), cpu_seconds=row["cpu_seconds"])


@dataclass(frozen=True, kw_only=True)
class Released:
    """The group may be trained on: a grade per sample."""

    rung: Rung
    grades: tuple[Grade, ...]
    final: bool


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A released sample has its full reward."""

    kind: int
    sample: int
    provisional: float | None
    final: float
    provisional_rung: Rung


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    """The full verification of a sample ended without a reward."""

    kind: int
    sample: int
    grade: Grade


@dataclass(frozen=True, kw_only=True)
class SettledSample:
    """The last word on a sample."""

    provisional: float | None
    reward: float | None
    basis: Basis
    skipped: str


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The last word on the group; `released_on` is None when it was cancelled before its release."""

    released_on: Rung | None
    samples: tuple[SettledSample, ...]


Event = Released | Corrected | Unresolved | Settled
