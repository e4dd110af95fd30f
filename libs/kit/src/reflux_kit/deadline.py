"""Deadlines that follow a call from service to service."""

import contextvars
import time

_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("deadline", default=None)


def enter(seconds: float | None) -> None:
    """Starts the current call's budget; `None` means that the caller set none."""
    _deadline.set(None if seconds is None else time.monotonic() + seconds)


def budget(default_seconds: float) -> float:
    """Seconds that an outgoing call may take: the smaller of `default_seconds` and what the caller has left."""
    deadline = _deadline.get()
    return default_seconds if deadline is None else min(default_seconds, max(0.0, deadline - time.monotonic()))
