"""A circuit breaker per replica: after too many failures it gets nothing for a while, then a few probes."""

import enum
from collections import deque
from dataclasses import dataclass


class Position(enum.Enum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """A few probes."""


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens and closes; caller's mistakes (4xx) are no failures and are not told to it."""

    window_requests: int = 20
    """Outcomes that are looked at."""
    min_failures: int = 5
    """Fewer failures among them never open it."""
    failure_rate: float = 0.5
    """Part of the outcomes looked at that must have failed."""
    open_seconds: float = 5.0
    """First rest; doubles with each failed probe."""
    max_open_seconds: float = 60.0
    probes: int = 2
    """Requests at once while half open, and successes that close it."""

    def __post_init__(self) -> None:
        if not (0 < self.failure_rate <= 1 <= self.min_failures <= self.window_requests and self.probes >= 1):
            raise ValueError(f"limits of a circuit breaker that can never open or close: {self}")


class Breaker:
    """Closed, open, half open (Nygard, "Release It!", 2007), with a window of outcomes as in resilience4j.

    A window of counts and not of time: its memory is bounded, and a busy replica with rare failures never opens.
    The caller brings the clock, asks `allows` before it chooses, says `started` when it sends and then exactly one of
    `succeeded`, `failed`, `cancelled`. A probe that is never answered frees its place after a rest's length.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._failures: deque[bool] = deque(maxlen=self._limits.window_requests)
        self._opened: float | None = None
        self._rest_seconds = self._limits.open_seconds
        self._probes: deque[float] = deque()
        self._successes = 0

    def position(self, now: float) -> Position:
        """Where it is at a moment of the clock."""
        if self._opened is None:
            return Position.CLOSED
        return Position.OPEN if now < self._opened + self._rest_seconds else Position.HALF_OPEN

    def allows(self, now: float) -> bool:
        """True when a request may be sent now."""
        position = self.position(now)
        if position is Position.HALF_OPEN:
            under_way = sum(1 for started in self._probes if now < started + self._rest_seconds)
            return under_way < self._limits.probes
        return position is Position.CLOSED

    def started(self, now: float) -> None:
        """Counts a probe while it is half open."""
        if self.position(now) is Position.HALF_OPEN:
            while self._probes and now >= self._probes[0] + self._rest_seconds:
                self._probes.popleft()
            self._probes.append(now)

    def succeeded(self, now: float) -> None:
        """An answer came; enough of them close it."""
        if self._opened is None:
            self._failures.append(False)
        elif self.position(now) is Position.HALF_OPEN:
            self._answered()
            self._successes += 1
            if self._successes >= self._limits.probes:
                self._opened, self._rest_seconds = None, self._limits.open_seconds
                self._failures.clear()
                self._probes.clear()

    def failed(self, now: float) -> None:
        """The replica broke, refused a connection or answered 5xx."""
        position = self.position(now)
        if position is Position.HALF_OPEN:
            self._open(now, min(2 * self._rest_seconds, self._limits.max_open_seconds))
        elif position is Position.CLOSED:
            self._failures.append(True)
            count = sum(self._failures)
            if count >= self._limits.min_failures and count >= self._limits.failure_rate * len(self._failures):
                self._open(now, self._limits.open_seconds)

    def cancelled(self, now: float) -> None:
        """The caller went away: neither good nor bad, but its probe is over."""
        if self.position(now) is Position.HALF_OPEN:
            self._answered()

    def _open(self, now: float, rest_seconds: float) -> None:
        self._opened, self._rest_seconds, self._successes = now, rest_seconds, 0
        self._probes.clear()

    def _answered(self) -> None:
        if self._probes:
            self._probes.popleft()
