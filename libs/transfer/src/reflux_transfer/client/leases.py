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

    A lease that comes too late does no harm: its reader finds the generation gone and takes another source.
    """
    request = pb.WatchLeasesRequest(model_id=model_id, replica=replica, generations=generations)
    while True:
        try:
            async for lease in stub.WatchLeases(request):
                _apply(arenas, lease, f"join/{lease.holder}")
        except AioRpcError as error:
            log.debug("leases on %s are not heard of: %s", replica or "the publisher", error.details())
        await asyncio.sleep(_PAUSE_SECONDS)


def _apply(arenas: Leased, lease: pb.WatchLeasesResponse, holder: str) -> None:
    if lease.seconds <= 0:
        arenas.release(lease.generation, holder)
        return
    try:
        arenas.lease(lease.generation, holder, lease.seconds)
    except KeyError as error:
        log.info("%s comes too late: %s", holder, error)
