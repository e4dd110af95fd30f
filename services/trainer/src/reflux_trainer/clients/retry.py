"""Waits for a peer that is away: backoff up to two seconds, until a deadline."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from reflux_kit.errors import reason_of

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""Codes after which the same call may succeed."""
TRANSIENT_REASONS = ("UNKNOWN_MODEL",)
"""Reasons that pass: the gateway knows no replica of the model while all of them restart."""
_FIRST_SECONDS = 0.1
_MOST_SECONDS = 2.0


class PeerAway(RuntimeError):
    """A peer did not come back in time; nothing is known about the request itself."""


class Refused(RuntimeError):
    """A peer will never accept this request."""


async def patiently(what: str, seconds: float, call: Callable[[float], Awaitable[Answer]]) -> Answer:
    """Repeats an idempotent `call` (it gets the seconds that are left). Raises PeerAway or Refused."""
    end, pause = time.monotonic() + seconds, _FIRST_SECONDS
    while True:
        try:
            return await call(max(0.1, end - time.monotonic()))
        except grpc.aio.AioRpcError as error:
            text = f"{what}: {error.code().name}: {error.details()}"
            if error.code() not in TRANSIENT and reason_of(error) not in TRANSIENT_REASONS:
                raise Refused(text) from None
            if time.monotonic() + pause > end:
                raise PeerAway(f"{text} (waited {seconds:.0f} s)") from None
            log.info("%s; trying again", text)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS)
