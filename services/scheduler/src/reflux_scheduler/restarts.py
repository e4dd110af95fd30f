"""When a member that ended is started again: bounded per window, with a growing pause. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WINDOW_SECONDS = 600.0
"""Restarts older than this no longer count against `max_restarts` (the window that the proto states)."""

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows an end: the member is done, starts again after `pause_seconds`, or failed for good."""

    action: Literal["succeeded", "restart", "failed"]
    pause_seconds: float = 0.0
    cause: str = ""


def recent(restart_times: Sequence[float], now: float) -> tuple[float, ...]:
    """The restarts that still count."""
    return tuple(time for time in restart_times if now - time < WINDOW_SECONDS)


def judge(exit_code: int, restart_times: Sequence[float], now: float, max_restarts: int) -> Verdict:
    """Policy on_failure: status 0 is success, anything else restarts while the bound allows it.

    Args:
        exit_code: status of the process, negative for a signal.
        restart_times: times of the restarts so far, same clock as `now`, in seconds.
        now: the present.
        max_restarts: restarts allowed within WINDOW_SECONDS; 0 never restarts.
    """
    if exit_code == 0:
        return Verdict("succeeded")
    counted = len(recent(restart_times, now))
    if counted >= max_restarts:
        bound = f"{counted} restarts within {WINDOW_SECONDS:g} s" if counted else "no restart is allowed"
        return Verdict("failed", cause=f"{ended(exit_code)}; {bound}")
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**counted)
    return Verdict("restart", pause, ended(exit_code))


def ended(exit_code: int) -> str:
    """An exit code in words."""
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with status {exit_code}"
