"""A run as it is stored: configuration, state machine, and what it may do next. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from reflux_kit.errors import WrongState
from reflux_runs.config import RunConfig
from reflux_runs.load import load_document

State = Literal["PENDING", "WARMING_UP", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset(("SUCCEEDED", "FAILED", "CANCELLED"))
_NEXT: Mapping[State, frozenset[State]] = {
    "PENDING": frozenset(("PENDING", "WARMING_UP", "RUNNING", "FAILED", "CANCELLED")),
    "WARMING_UP": frozenset(("PENDING", "RUNNING", "FAILED", "CANCELLED")),
    "RUNNING": frozenset(("PENDING", "SUCCEEDED", "FAILED", "CANCELLED")),
    "SUCCEEDED": frozenset(),
    "FAILED": frozenset(("PENDING",)),
    "CANCELLED": frozenset(("PENDING",)),
}
"""A trainer that restarts, and a person who resumes, put a run back to PENDING."""


@dataclass(frozen=True)
class RunRecord:
    """One run. Times are Unix seconds."""

    run: str
    config: RunConfig
    state: State = "PENDING"
    paused: bool = False
    """Shown as PAUSED while the run is under way."""
    message: str = ""
    created_at: float = 0.0
    ended_at: float = 0.0
    attempt: int = 1
    reached: int = 0
    """Last logged learner operation when the present attempt began."""
    fruitless: int = 0
    """Consecutive earlier attempts that logged no further operation."""
    job: str = ""
    folder: str = ""
    tenant: str = ""
    """Who started it; empty for operators."""
    forked_from: str = ""
    """Checkpoint of another run that this one starts from."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def shown_state(self) -> str:
        """The state for people and for the wire."""
        return "PAUSED" if self.paused and self.state in ("WARMING_UP", "RUNNING") else self.state

    def to(self, state: State, *, message: str = "", now: float = 0.0) -> Self:
        """The record in its next state. Raises WrongState."""
        if state not in _NEXT[self.state]:
            raise WrongState(f"run {self.run} is {self.shown_state}: it cannot become {state}", state=self.shown_state)
        ended_at = now if state in ENDED else 0.0
        return replace(self, state=state, message=message, ended_at=ended_at, paused=self.paused and state not in ENDED)

    def to_bytes(self) -> bytes:
        document = vars(self) | {"config": self.config.model_dump(exclude_none=True)}
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        document = json.loads(raw)
        return cls(**(document | {"config": load_document(document["config"])}))
