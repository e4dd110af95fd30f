"""The learner of a base model as its models see it: connected, the base loaded, found again when it is replaced."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_runs.preflight import MAX_BATCH_MIB
from reflux_trainer.learners import LearnerEntry
from reflux_trainer.peers import Peers
from reflux_trainer.tinker.fleet import Fleet

if TYPE_CHECKING:
    from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceAsyncStub

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_STATUS_SECONDS = 10.0
_LOAD_SECONDS = 300.0


class LearnerGone(ConnectionError):
    """The learner process ended, or lost what the call needs; it has to be prepared again."""


class Refused(Exception):
    """The learner refused a call; `user` when the request was at fault, else the platform."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details() or error.code().name)
        self.user = error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
        self.transient = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class LearnerLink:
    """Owns the channel to a base's present learner."""

    def __init__(self, fleet: Fleet, peers: Peers, weight_dtype: str) -> None:
        self.base, self._fleet, self._peers = fleet.base, fleet, peers
        self._weight_dtype = weight_dtype
        self._lock = asyncio.Lock()
        self._entry: LearnerEntry | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: LearnerServiceAsyncStub | None = None

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()

    @property
    def incarnation(self) -> str:
        """The learner process that last announced itself; "" without one."""
        entry = self._peers.learners.get(self.base.run)
        return entry.incarnation if entry else ""

    async def ready(self) -> str:
        """Waits for a learner with the base loaded; returns its incarnation. Raises Unavailable without a job."""
        while True:
            await self._fleet.ensure()
            entry = self._peers.learners.get(self.base.run)
            if entry is not None:
                if entry == self._entry:
                    return entry.incarnation
                async with self._lock:
                    if entry == self._entry or await self._prepare(entry):
                        return entry.incarnation
            await self._peers.learners.changed(0.5)

    async def _prepare(self, entry: LearnerEntry) -> bool:
        await self.close()
        options = {"subject": "trainer", "max_message_mib": MAX_BATCH_MIB}
        self._channel = open_channel(entry.address, self._peers.settings, **options)
        stub = LearnerServiceStub(self._channel)
        try:
            status = await stub.GetLearner(pb.GetLearnerRequest(), timeout=_STATUS_SECONDS)
            if status.incarnation != entry.incarnation:
                return False
            if status.model_id != self.base.run:
                request = pb.CreateModelRequest(
                    model_id=self.base.run,
                    path=str(self.base.folder.resolve()),
                    transport="auto",
                    weight_dtype=self._weight_dtype,
                )
                await stub.CreateModel(request, timeout=_LOAD_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("the learner of %s does not answer yet: %s", self.base.name, error.details())
            await asyncio.sleep(0.2)
            return False
        self._entry, self._stub = entry, stub
        return True

    async def call(self, send: Callable[["LearnerServiceAsyncStub"], Awaitable[Answer]]) -> Answer:
        """One call of the prepared learner. Raises LearnerGone or Refused."""
        entry, stub = self._entry, self._stub
        if stub is None:
            raise LearnerGone("there is no learner yet")
        try:
            return await send(stub)
        except grpc.aio.AioRpcError as error:
            reason = reason_of(error)
            replaced = entry != self._peers.learners.get(self.base.run)
            if replaced or reason == "NOT_FOUND" or (error.code() in _LOST and not reason):
                if self._entry is entry:
                    self._entry = None
                raise LearnerGone(error.details() or error.code().name) from None
            raise Refused(error) from None
