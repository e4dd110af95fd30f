"""Owns which scheduler an agent talks to: the configured addresses in turn, or the leader that a follower names."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc

from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import metadata_of
from reflux_kit.settings import ServiceSettings

if TYPE_CHECKING:
    from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub


class Schedulers:
    """One channel at a time. `addresses` is "host:port", or several with commas between."""

    def __init__(self, addresses: str, settings: ServiceSettings) -> None:
        self._addresses = [address.strip() for address in addresses.split(",") if address.strip()]
        self._settings = settings
        self._closing: set[asyncio.Task[None]] = set()
        self._use(self._addresses[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def turn_after(self, error: grpc.aio.AioRpcError) -> bool:
        """After a call that failed: goes to the leader that the answer names, else to the next address. Whether the
        next call meets another scheduler."""
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return False
        return self.turn(metadata_of(error).get("leader", ""))

    def turn(self, leader: str = "") -> bool:
        """Goes to a leader, else to the next address. Whether the next call meets another scheduler."""
        if not leader and self.address in self._addresses:
            position = self._addresses.index(self.address)
            leader = self._addresses[(position + 1) % len(self._addresses)]
        leader = leader or self._addresses[0]
        if leader == self.address:
            return False
        task = asyncio.create_task(self._channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._use(leader)
        return True

    def _use(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address, self._settings, subject="agent")
        self.stub = cast("SchedulerServiceAsyncStub", SchedulerServiceStub(self._channel))
