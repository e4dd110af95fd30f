"""A request that one replica answers, without the generators of `Dispatcher.stream`: they cost more than the relay."""

import asyncio
from collections.abc import Awaitable, Callable

from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.share import ReplicaLost, Share
from reflux_inference_gateway.want import Want

Attempt = Callable[[Replica, Share], Awaitable[bool]]
"""Asks a replica and passes its answer on; False when the answer says that the replica failed. Raises ReplicaLost. It
sets `attempts.delivered` before the client sees a byte."""


async def serve_single(dispatcher: Dispatcher, want: Want, attempt: Attempt) -> None:
    """Like `Dispatcher.stream`: the same ledger, placement, re-issue and errors. Cancel it to cancel upstream."""
    with dispatcher._staying(want) as stay:
        share = Share(want, 0, want.num_samples, stay, dispatcher.clock() + want.deadline_seconds)
        while True:
            try:
                replica = await dispatcher._place(share)
                stay.start()
                share.verdict = await _watched(dispatcher, replica, attempt(replica, share))
                return
            except ReplicaLost as error:
                dispatcher._lose(share, error)
            finally:
                dispatcher._leave(share)


async def _watched(dispatcher: Dispatcher, replica: Replica, attempt: Awaitable[bool]) -> bool:
    """The attempt, which ends as soon as the replica is abandoned."""
    waits = dispatcher._waits.setdefault(replica.info.name, set())
    try:
        async with asyncio.timeout(None) as wait:
            waits.add(wait)
            try:
                return await attempt
            finally:
                waits.discard(wait)
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise ReplicaLost("it sends no heartbeat any more") from error
