"""Keeps generations readable for those whom the broker has sent to read them."""

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from grpc.aio import AioRpcError

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb

if TYPE_CHECKING:
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""For readers that are under way when the broker that sent them is lost."""


class Leased(Protocol):
    """Arenas of a publisher or a replica."""

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        """Raises `KeyError` when the generation is gone."""
        ...

    def release(self, generation: int, holder: str) -> None:
        """Ends a lease; unknown ones are ignored."""
        ...


async def keep_leases(
    stub: "WeightBrokerServiceAsyncStub",
    model_id: str,
    replica: str,
    arenas: Leased,
    generations: Iterable[int] = (),
) -> None:
    """Follows the leases on the memory of a replica (the publisher: an empty name) until it is cancelled.

    A lease that comes too late does no harm: its reader finds the generation gone and takes another source. When the
    stream ends the leases end soon, too: the broker repeats those that hold, and one that was restarted knows nothing
    of the others, which would keep an arena from the next version.
    """
    held: set[tuple[int, str]] = set()
    request = pb.WatchLeasesRequest(model_id=model_id, replica=replica, generations=generations)
    while True:
        try:
            async for lease in stub.WatchLeases(request):
                holder = f"join/{lease.holder}"
                (held.add if lease.seconds > 0 else held.discard)((lease.generation, holder))
                _apply(arenas, lease.generation, holder, lease.seconds)
        except AioRpcError as error:
            log.debug("leases on %s are not heard of: %s", replica or "the publisher", error.details())
        while held:
            _apply(arenas, *held.pop(), _GRACE_SECONDS)
        await asyncio.sleep(_PAUSE_SECONDS)


def _apply(arenas: Leased, generation: int, holder: str, seconds: float) -> None:
    if seconds <= 0:
        arenas.release(generation, holder)
        return
    try:
        arenas.lease(generation, holder, seconds)
    except KeyError as error:
        log.info("%s comes too late: %s", holder, error)
