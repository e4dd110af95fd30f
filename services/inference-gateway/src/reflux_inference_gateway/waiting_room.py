"""Requests that fit but find every replica full: they queue here, fairly between tenants, and go as room comes."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reflux_inference_gateway.errors import NoReplica, Overloaded
from reflux_inference_gateway.policy.admission import Admission
from reflux_inference_gateway.policy.waiting_line import Entry
from reflux_inference_gateway.want import Want

T = TypeVar("T")
_MAX_PASSED_OVER = 64
"""Requests that are looked at in vain in one go: they are bound to replicas that are full while others are not."""


class NoTurn(Exception):
    """`place` says that room alone would not help the request: it leaves the queue."""


@dataclass(eq=False)
class _Turn:
    """One request that waits; `place` sends it somewhere, or says None while it cannot."""

    place: Callable[[], Any | None]
    given_up: Callable[[], bool]
    result: asyncio.Future[Any]

    def take(self) -> bool:
        """True when the request needs no further turn: it has a place, or an answer why it gets none."""
        if not self.result.done():
            try:
                placed = self.place()
            except Exception as error:  # task boundary: the request's own task raises it
                self.result.set_exception(error)
            else:
                if placed is not None:
                    self.result.set_result(placed)
        return self.result.done()

    def refuse(self, error: Exception) -> None:
        """Ends the wait, unless its task was cancelled just now and has not run since."""
        if not self.result.done():
            self.result.set_exception(error)


@dataclass
class WaitingRoom:
    """Owns a queue per model. Requests never overtake it: who comes while others wait waits, too."""

    has_room: Callable[[str], bool]
    """True when a replica of the model takes another request."""
    max_waiting: int
    """Per model; above it the tenant that waits with most requests per weight loses one to Overloaded."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants; 1 for those that are not named."""
    _lines: dict[str, Admission] = field(default_factory=dict)
    _turns: dict[str, _Turn] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def is_empty(self, model_id: str) -> bool:
        """True when nobody waits for the model."""
        return model_id not in self._lines

    async def turn(self, want: Want, deadline: float, seconds: float, place: Callable[[], T | None]) -> T:
        """What `place` gives as soon as it is the request's turn and it gives something.

        Its load counts as soon as it is placed: a caller that is cancelled just then has to undo it. Raises what
        `place` raises, Overloaded when it is turned away, and NoReplica after `seconds`, its deadline.
        """
        arrival, model_id = next(self._numbers), want.model_id
        key = str(arrival)
        turn = self._turns[key] = _Turn(place, want.given_up, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(model_id, Admission(self.max_waiting, self.weights))
        entry = Entry(
            key=key,
            tenant=want.tenant,
            cost=want.num_tokens,
            priority=want.priority,
            deadline=deadline,
            arrival=arrival,
        )
        try:
            if (refused := line.offer(entry)) is not None:
                error = Overloaded(f"{self.max_waiting} requests of {model_id!r} queue already")
                self._turns[refused.key].refuse(error)
            self.serve(model_id)
            async with asyncio.timeout(seconds):
                return await turn.result
        except TimeoutError as error:
            raise NoReplica(f"every replica of {model_id!r} was full until the deadline", state="full") from error
        finally:
            del self._turns[key]
            line.cancel(key)
            turn.result.cancel()
            if not len(line) and self._lines.get(model_id) is line:
                del self._lines[model_id]

    def serve(self, *model_ids: str) -> None:
        """Room may have come at a process that serves these models: sends who goes next, until there is no room."""
        for model_id in model_ids:
            self._serve(model_id)

    def _serve(self, model_id: str) -> None:
        line, passed_over = self._lines.get(model_id), []
        while line is not None and len(passed_over) < _MAX_PASSED_OVER and self.has_room(model_id):
            entry = line.take()
            if entry is None:
                break
            if not self._turns[entry.key].take():
                passed_over.append(entry)
        for entry in passed_over:
            assert line is not None
            line.give_back(entry)

    def changed(self) -> None:
        """The fleet changed, or somebody aborted a request."""
        for turn in self._turns.values():
            if turn.given_up():
                turn.take()
        for model_id in tuple(self._lines):
            self.serve(model_id)
