"""Which keys and values are computed next, a bounded chunk between two decode steps. Pure.

A row is *stale* from a swap until all of its keys and values are those of the current weights; it does not decode
meanwhile, and neither does a row whose prompt is not filled. A chunk may end inside a row, so that a chunk's cost does
not depend on the length of the rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_CHUNK_SECONDS = 0.020
_PART_OF_STEP = 0.75
"""Of a decode step: the learner stages on the same processors, and a chunk that aims at a whole step overruns it. The
smaller a chunk, the later the last row is fresh."""
_FLOOR_TOKENS = 16
"""A chunk reads all weights once, however small it is: below this it would cost the same and do less."""

_WEIGHT = 0.5
"""Of the latest chunk in the running mean."""


class Pace:
    """Owns the size of a chunk: as many tokens as take 20 ms, or three quarters of a decode step of all rows if that is
    more.

    Before anything is measured a chunk has as many tokens as rows run: the same matrix products as a decode step.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` bounds a chunk whatever was measured."""
        self._max_tokens = max_tokens
        self._tokens_per_second = 0.0
        self._step_seconds = 0.0

    def tokens(self, running: int) -> int:
        """Size of the next chunk while `running` rows are seated."""
        wanted = self._tokens_per_second * max(_CHUNK_SECONDS, _PART_OF_STEP * self._step_seconds)
        return min(self._max_tokens, max(_FLOOR_TOKENS, int(wanted) if self._tokens_per_second else running))

    def decoded(self, seconds: float) -> None:
        """A decode step of all rows took this long."""
        self._step_seconds = _mean(self._step_seconds, seconds)

    def refreshed(self, tokens: int, seconds: float) -> None:
        """A chunk took this long."""
        if seconds > 0:
            self._tokens_per_second = _mean(self._tokens_per_second, tokens / seconds)


@dataclass(frozen=True)
class Unfilled:
    """One row that waits: positions below `done` are computed, those below `length` are needed."""

    row: int
    turn: int
    """Number of the swap or the admission since which it waits; a row that missed a second swap keeps the first."""
    done: int
    length: int


@dataclass(frozen=True)
class Piece:
    """Positions `start .. end-1` of a row are to be computed; the row is filled then if `last`."""

    row: int
    start: int
    end: int
    last: bool


def next_pieces(unfilled: Iterable[Unfilled], tokens: int) -> list[Piece]:
    """The next chunk. Rows that have waited longest come first, so that frequent swaps starve none; of equal ones those
    that have least left: the first row is back as early as possible.
    """
    pieces: list[Piece] = []
    for one in sorted(unfilled, key=lambda one: (one.turn, one.length - one.done, one.row)):
        if tokens <= 0:
            break
        end = min(one.length, one.done + tokens)
        pieces.append(Piece(one.row, one.done, end, end == one.length))
        tokens -= end - one.done
    return pieces


@dataclass(frozen=True)
class SwapFigures:
    """What one swap did to the rows that were running."""

    pause_seconds: float
    """Longest gap between two decode steps, from the last one before the swap until no row was stale."""
    refresh_seconds: float
    """From the swap until no row was stale."""
    refreshed_tokens: int


class PauseMeter:
    """Owns the visible pause: the longest time between two decode steps while rows were there to decode."""

    def __init__(self, settled: Callable[[SwapFigures], None]) -> None:
        """`settled` gets the figures of each swap, once no row is stale and decoding goes on."""
        self._settled = settled
        self._last_end: float | None = None
        self._swapped_at: float | None = None
        self._tokens = 0
        self.longest_seconds = 0.0
        self.resumed = True
        """False from a swap to the next decode step, or until there is no row."""

    def swapped(self, now: float) -> None:
        """New weights are current. A swap that comes before the last one has settled ends its measurement."""
        self._settle(now)
        self._swapped_at, self._tokens, self.longest_seconds, self.resumed = now, 0, 0.0, False

    def refreshed(self, tokens: int) -> None:
        """A chunk was computed."""
        self._tokens += tokens

    def decoded(self, start: float, end: float, *, stale: bool) -> None:
        """A decode step ran; `stale` tells that some rows still wait for their chunk."""
        if self._swapped_at is not None and self._last_end is not None:
            self.longest_seconds = max(self.longest_seconds, start - self._last_end)
        self._last_end, self.resumed = end, True
        if not stale:
            self._settle(start)

    def idle(self, now: float) -> None:
        """There is no row: until one is seated nobody waits."""
        self._last_end, self.resumed = None, True
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self._swapped_at is not None:
            begun, self._swapped_at = self._swapped_at, None
            self._settled(SwapFigures(self.longest_seconds, now - begun, self._tokens))


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
