"""Leases that a broker asks for, over the loss of that broker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_transfer.client.leases import keep_leases


class Broker:
    """Asks for leases on one stream, then is lost; the next stream stays silent."""

    def __init__(self, *leases: pb.WatchLeasesResponse) -> None:
        self._streams = [leases, ()]
        self.lost = asyncio.Event()

    async def WatchLeases(self, request: pb.WatchLeasesRequest) -> AsyncIterator[pb.WatchLeasesResponse]:
        for lease in self._streams.pop(0):
            yield lease
        if not self._streams:
            self.lost.set()
            await asyncio.Event().wait()


class Arenas:
    """Remembers the last word on every lease."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], float] = {}

    def lease(self, generation: int, holder: str, seconds: float) -> None:
        self.seconds[generation, holder] = seconds

    def release(self, generation: int, holder: str) -> None:
        del self.seconds[generation, holder]


async def test_leases_end_soon_when_the_broker_is_lost_that_asked_for_them() -> None:
    reads = pb.WatchLeasesResponse(generation=1, holder="replica-3", seconds=60)
    done = pb.WatchLeasesResponse(generation=2, holder="replica-0", seconds=60)
    broker, arenas = Broker(reads, done, pb.WatchLeasesResponse(generation=2, holder="replica-0")), Arenas()
    keeper = asyncio.create_task(keep_leases(cast("Any", broker), "runs/r1", "", arenas))
    await asyncio.wait_for(broker.lost.wait(), 30)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert list(arenas.seconds) == [(1, "join/replica-3")]
    assert arenas.seconds[1, "join/replica-3"] < 10
