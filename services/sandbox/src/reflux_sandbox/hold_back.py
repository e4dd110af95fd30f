"""Holds new groups back at the gateway while too many verifications wait: nobody generates what cannot be graded soon.

The hold is a lease that is renewed. A sandbox that dies, or a gateway that restarts, leaves nothing held.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from prometheus_client import Gauge
from redis.exceptions import RedisError

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_kit.channel import open_channel
from reflux_sandbox.settings import SandboxSettings

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub

log = logging.getLogger(__name__)
_PERIOD_SECONDS, _LEASE_SECONDS, _CALL_SECONDS = 1.0, 10.0, 5.0
_LOW = 0.5
"""Share of the bound below which groups begin again."""
HOLDING = Gauge("reflux_sandbox_holds_groups_back", "1 while new groups are held at the gateway for the queue's depth")


def held_next(holding: bool, depth: int, above: int) -> bool:
    """Whether to hold with `depth` jobs waiting: from more than `above` on, down to half of it. Pure."""
    return depth > (above * _LOW if holding else above)


@asynccontextmanager
async def holding_back(
    settings: SandboxSettings, depths: Callable[[], Awaitable[Mapping[str, int]]]
) -> AsyncIterator[None]:
    """Watches the queue while the block runs; 0 in `hold_groups_above` watches nothing."""
    if not settings.hold_groups_above:
        yield
        return
    async with open_channel(settings.gateway_address, settings, subject="sandbox") as channel:
        watching = asyncio.create_task(_watch(InferenceGatewayServiceStub(channel), settings.hold_groups_above, depths))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    stub: "InferenceGatewayServiceAsyncStub", above: int, depths: Callable[[], Awaitable[Mapping[str, int]]]
) -> None:
    holding = False
    while True:
        try:
            depth = sum((await depths()).values())
            before, holding = holding, held_next(holding, depth, above)
            await _tell(stub, before, holding)
            if holding != before:
                log.info("%d verifications wait: new groups %s", depth, "are held" if holding else "begin again")
        except (grpc.aio.AioRpcError, RedisError) as error:  # away: the lease runs out by itself
            log.warning("the gateway does not hold groups back: %s", error)
        HOLDING.set(holding)
        await asyncio.sleep(_PERIOD_SECONDS)


async def _tell(stub: "InferenceGatewayServiceAsyncStub", before: bool, holding: bool) -> None:
    beginnings = pb.PauseFleetRequest.MODE_BEGINNINGS
    if holding:
        request = pb.PauseFleetRequest(mode=beginnings, lease_seconds=_LEASE_SECONDS)
        await stub.PauseFleet(request, timeout=_CALL_SECONDS)
    elif before:
        await stub.ResumeFleet(pb.ResumeFleetRequest(mode=beginnings), timeout=_CALL_SECONDS)
