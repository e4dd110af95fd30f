"""Puts each new weight version on the fleet while the loop goes on; new prompts are issued for it after the commit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc

from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker_pb
from reflux_trainer.learner_client import LearnerClient, LearnerFailed
from reflux_trainer.watchdog import Waits

if TYPE_CHECKING:
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub

log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5


class SyncFailed(RuntimeError):
    """A version could not be put on the fleet, twice; the text is the receiver's."""


@dataclass(frozen=True)
class Sync:
    """One committed version."""

    version: int
    epoch: int
    seconds: float
    stage_seconds: float
    bytes: int
    at: float
    """Unix time in seconds."""
    replicas: dict[str, int]
    """Version that each replica serves."""
    pause_ms: float
    """Longest pause of a replica."""


@dataclass(frozen=True)
class Probe:
    """Prompt that learner and replicas score at every `every`-th version, the first one included; 0 is never."""

    every: int = 0
    token_ids: tuple[int, ...] = ()

    def of(self, number: int) -> tuple[int, ...]:
        """The prompt for publish `number`, from 0; empty when it compares nothing."""
        return self.token_ids if self.every and number % self.every == 0 else ()


class Publisher:
    """At most one version is under way. Failures surface in `settled`, and end the task group that owns the tasks."""

    def __init__(
        self,
        learner: LearnerClient,
        broker: "WeightBrokerServiceAsyncStub",
        tasks: asyncio.TaskGroup,
        waits: Waits,
        model_id: str,
        sync_timeout_seconds: float,
        probe: Probe = Probe(),
    ) -> None:
        self._learner = learner
        self._broker = broker
        self._tasks = tasks
        self._waits = waits
        self._model_id = model_id
        self._timeout = sync_timeout_seconds
        self._probe = probe
        self._number = 0
        self._running: asyncio.Task[None] | None = None
        self.last: Sync | None = None

    def start(self, on_commit: Callable[[int], Awaitable[None]]) -> None:
        """Begins to publish the learner's present weights; `on_commit` gets the version."""
        assert self._running is None or self._running.done()
        self._running = self._tasks.create_task(self._publish(on_commit), name="publish")

    async def settled(self) -> None:
        """Returns when no version is under way."""
        if self._running is not None and not self._running.done():
            with self._waits.on("sync", "the weight broker and the replicas to commit the new version"):
                await asyncio.wait([self._running])
                # A failure ends the task group; waiting on lets its cancellation arrive here.
                if self._running.exception() is not None:
                    await asyncio.Event().wait()

    async def _publish(self, on_commit: Callable[[int], Awaitable[None]]) -> None:
        answer = await self._publish_twice(self._probe.of(self._number))
        self._number += 1
        await on_commit(answer.version)
        replicas, pause_ms = await self._replicas()
        self.last = Sync(
            version=answer.version,
            epoch=answer.epoch,
            seconds=answer.sync_seconds,
            stage_seconds=answer.stage_seconds,
            bytes=answer.bytes,
            at=time.time(),
            replicas=replicas,
            pause_ms=pause_ms,
        )

    async def _publish_twice(self, probe_token_ids: tuple[int, ...]) -> learner_pb.PublishWeightsResponse:
        failures, end, request_id = 0, time.monotonic() + self._timeout, str(uuid4())
        while True:
            try:
                return await self._learner.publish(self._timeout, request_id, probe_token_ids)
            except LearnerFailed as error:
                # A broker that restarts is waited for; a receiver that refuses gets one more chance.
                failures += not error.transient
                if failures > 1 or (error.transient and time.monotonic() > end):
                    raise SyncFailed(f"the new weights did not reach the fleet: {error}") from None
                log.warning("publishing failed, trying once more: %s", error)
                if not error.unknown:
                    request_id = str(uuid4())  # the old one would be answered with the old outcome
                await asyncio.sleep(_RETRY_SECONDS)

    async def _replicas(self) -> tuple[dict[str, int], float]:
        request = broker_pb.ListReplicasRequest(model_id=self._model_id)
        try:
            replicas = (await self._broker.ListReplicas(request, timeout=5.0)).replicas
        except grpc.aio.AioRpcError as error:  # figures only: the version is committed
            log.info("the broker did not list its replicas: %s", error.code().name)
            return {}, 0.0
        return {state.replica: state.version for state in replicas}, max(
            (state.pause_ms for state in replicas), default=0.0
        )
