"""The fleet's pause and the ledger that proves it lost nothing. Pure but for its clock."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ALL_MODELS = "*"


@dataclass
class Ledger:
    """Counts every request once on entry and once on exit.

    Invariant: entered == held + running + completed + failed + cancelled.
    """

    entered: int = 0
    held: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    def balanced(self) -> bool:
        """True unless a request was lost or counted twice."""
        ended = self.completed + self.failed + self.cancelled
        return self.entered == self.held + self.running + ended and min(self.held, self.running) >= 0


class FleetPaused(Exception):
    """The fleet holds this many requests already; the caller must back off."""


@dataclass
class Fleet:
    """Owns which models are paused and the ledger of requests; a request moves held -> running -> ended."""

    max_held: int = 4096
    ledger: Ledger = field(default_factory=Ledger)
    _paused: set[str] = field(default_factory=set)
    _parked: set[str] = field(default_factory=set)
    clock: Callable[[], float] = time.monotonic
    _held_back: dict[str, float] = field(default_factory=dict)
    """Models of which nothing begins, and until when."""
    _held_by_model: dict[str, int] = field(default_factory=dict)
    _running_by_model: dict[str, int] = field(default_factory=dict)

    def is_paused(self, model_id: str) -> bool:
        """True when all requests of the model are held."""
        return ALL_MODELS in self._paused or model_id in self._paused

    def holds(self, model_id: str, *, begins: bool) -> bool:
        """True when a request of the model is held that begins something, or goes on with something."""
        return self.is_paused(model_id) or (begins and self._is_held_back(model_id))

    def _is_held_back(self, model_id: str) -> bool:
        ends = [self._held_back[name] for name in (ALL_MODELS, model_id) if name in self._held_back]
        return bool(ends) and self.clock() < max(ends)

    def paused_models(self) -> list[str]:
        """Paused models in alphabetical order; "*" stands for all."""
        return sorted(self._paused)

    def held_back_models(self) -> list[str]:
        """Models of which nothing new begins, in alphabetical order; "*" stands for all."""
        return sorted(name for name, end in self._held_back.items() if self.clock() < end)

    def enter(self, model_id: str) -> None:
        """Takes a request in; raises FleetPaused when too many are held. It counts as held until `run`."""
        if self.ledger.held >= self.max_held:
            raise FleetPaused(f"{self.ledger.held} requests are held already")
        self.ledger.entered += 1
        self.ledger.held += 1
        self._add(self._held_by_model, model_id, 1)

    def run(self, model_id: str) -> None:
        """A held request goes to a replica."""
        self.ledger.held -= 1
        self.ledger.running += 1
        self._add(self._held_by_model, model_id, -1)
        self._add(self._running_by_model, model_id, 1)

    def hold_again(self, model_id: str) -> None:
        """A running request lost its replica and waits for another one."""
        self.ledger.running -= 1
        self.ledger.held += 1
        self._add(self._running_by_model, model_id, -1)
        self._add(self._held_by_model, model_id, 1)

    def end(self, model_id: str, *, was_running: bool, outcome: str) -> None:
        """A request leaves with outcome "completed", "failed" or "cancelled"."""
        if was_running:
            self.ledger.running -= 1
            self._add(self._running_by_model, model_id, -1)
        else:
            self.ledger.held -= 1
            self._add(self._held_by_model, model_id, -1)
        setattr(self.ledger, outcome, getattr(self.ledger, outcome) + 1)

    def is_parked(self, model_id: str) -> bool:
        """True when not even running requests of the model go on."""
        return ALL_MODELS in self._parked or model_id in self._parked

    def running(self, model_id: str = "") -> int:
        """Requests of a model (of all when empty) that replicas have."""
        return self._running_by_model.get(model_id, 0) if model_id else self.ledger.running

    def pause(self, model_id: str = "", *, park: bool = False) -> int:
        """Holds new requests of a model (of all when empty); returns how many run on. `park` is for those, too."""
        self._paused.add(model_id or ALL_MODELS)
        if park:
            self._parked.add(model_id or ALL_MODELS)
        return self.running(model_id)

    def hold_back(self, model_id: str = "", seconds: float = math.inf) -> None:
        """Holds what begins, of a model (of all when empty), for so long; what goes on with something passes."""
        self._held_back[model_id or ALL_MODELS] = self.clock() + seconds

    def let_begin(self, model_id: str = "") -> int:
        """Ends `hold_back`; returns how many requests are held that no pause holds."""
        if model_id:
            self._held_back.pop(model_id, None)
        else:
            self._held_back.clear()
        held = self._held_by_model.items()
        return sum(count for model, count in held if model_id in ("", model) and not self.is_paused(model))

    def resume(self, model_id: str = "") -> int:
        """Releases held requests; returns how many. Empty ends every pause, that of single models included."""
        before = self._held_while_paused()
        if model_id:
            self._paused.discard(model_id)
            self._parked.discard(model_id)
        else:
            self._paused.clear()
            self._parked.clear()
        return before - self._held_while_paused()

    def _held_while_paused(self) -> int:
        return sum(held for model, held in self._held_by_model.items() if self.is_paused(model))

    @staticmethod
    def _add(counts: dict[str, int], model_id: str, delta: int) -> None:
        counts[model_id] = counts.get(model_id, 0) + delta
        if counts[model_id] == 0:
            del counts[model_id]


@dataclass
class Stay:
    """One request inside the fleet; it may be on several replicas at once, and counts once all the same."""

    fleet: Fleet
    model_id: str
    _on_replicas: int = 0

    def start(self) -> None:
        """A share of it goes to a replica; with the first one the request runs."""
        if not self._on_replicas:
            self.fleet.run(self.model_id)
        self._on_replicas += 1

    def stop(self) -> None:
        """A share lost its replica; the request is held again when no other share runs or has been answered."""
        self._on_replicas -= 1
        if not self._on_replicas:
            self.fleet.hold_again(self.model_id)

    def end(self, outcome: str) -> None:
        """It leaves with outcome "completed", "failed" or "cancelled"."""
        self.fleet.end(self.model_id, was_running=self._on_replicas > 0, outcome=outcome)
