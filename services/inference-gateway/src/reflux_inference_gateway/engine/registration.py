"""The engine's entry at the gateway: registered, kept alive, renewed after a gateway restart, withdrawn at the end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from grpc import aio

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub

log = logging.getLogger(__name__)

_CALL_SECONDS = 3.0
_RETRY_SECONDS = 0.5


class GatewayLink:
    """Owns the conversation with the gateway; `describe` gives the replica's present state."""

    def __init__(self, settings: ServiceSettings, describe: Callable[[], ReplicaMessage]) -> None:
        self._settings = settings
        self._describe = describe
        self._news = asyncio.Event()

    def announce(self) -> None:
        """Sends a heartbeat now: requests that wait for a version should not wait for the next one."""
        self._news.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Registers and keeps the entry alive until the block ends; a gateway that is away is retried for ever."""
        async with open_channel(self._settings.gateway_address, self._settings, subject="engine") as channel:
            stub = InferenceGatewayServiceStub(channel)
            task = asyncio.create_task(self._keep(stub))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self._withdraw(stub)

    async def _keep(self, stub: "InferenceGatewayServiceAsyncStub") -> None:
        heartbeat_seconds = 0.0
        reachable = True
        while True:
            try:
                if heartbeat_seconds == 0.0:
                    request = pb.RegisterReplicaRequest(replica=self._describe())
                    answer = await stub.RegisterReplica(request, timeout=_CALL_SECONDS)
                    heartbeat_seconds = max(0.05, answer.heartbeat_seconds)
                    log.info("registered with the gateway at %s", self._settings.gateway_address)
                else:
                    beat = pb.HeartbeatRequest(replica=self._describe())
                    if (await stub.Heartbeat(beat, timeout=_CALL_SECONDS)).register_again:
                        heartbeat_seconds = 0.0
                        continue
                reachable = True
            except aio.AioRpcError as error:
                if reachable:
                    log.warning("the gateway does not answer: %s %s", error.code().name, error.details())
                reachable = False
            await self._sleep(heartbeat_seconds if reachable else _RETRY_SECONDS)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _withdraw(self, stub: "InferenceGatewayServiceAsyncStub") -> None:
        try:
            await stub.DeregisterReplica(pb.DeregisterReplicaRequest(name=self._describe().name), timeout=1.0)
        except aio.AioRpcError as error:
            log.info("could not withdraw from the gateway: %s", error.code().name)
