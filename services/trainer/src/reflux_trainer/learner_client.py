"""The learner as the loop sees it: calls that survive the death of the process by load and replay."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_kit.settings import ServiceSettings
from reflux_runs.preflight import MAX_BATCH_MIB
from reflux_trainer import oplog
from reflux_trainer.learners import LearnerEntry, LearnerRegistry
from reflux_trainer.model_source import ModelSource
from reflux_trainer.queue.ledger import Ledger
from reflux_trainer.watchdog import Waits

if TYPE_CHECKING:
    from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceAsyncStub

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_STATUS_SECONDS = 5.0
_LOAD_SECONDS = 300.0
_PUBLISH_SLACK_SECONDS = 10.0
_UNKNOWN_OUTCOME = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_DAMAGED = ("WRONG_STATE", "NOT_FOUND")
"""Reasons of LoadState when an object of the checkpoint is damaged or missing."""


class LearnerFailed(RuntimeError):
    """The learner refused a call; the text is its own.

    `transient` when it lacked a peer that may come back, `unknown` when the call may still be under way.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"{error.details()} ({reason_of(error) or error.code().name})")
        self.transient = error.code() is grpc.StatusCode.UNAVAILABLE
        self.unknown = error.code() in _UNKNOWN_OUTCOME


class LearnerClient:
    """Calls the learner of one run. When the process is gone, its successor is brought to the same state first."""

    def __init__(
        self,
        source: ModelSource,
        settings: ServiceSettings,
        registry: LearnerRegistry,
        ledger: Ledger,
        waits: Waits,
        latest_checkpoint: Callable[[], Awaitable[checkpoint_pb2.Checkpoint | None]],
        scrub_checkpoint: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._source = source
        self._settings = settings
        self._registry = registry
        self._ledger = ledger
        self._waits = waits
        self._latest_checkpoint = latest_checkpoint
        self._scrub_checkpoint = scrub_checkpoint
        self._lock = asyncio.Lock()
        self._entry: LearnerEntry | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: LearnerServiceAsyncStub | None = None
        self.op_id = 0
        """Last operation that the learner has acknowledged."""
        self.version = 0
        self.recoveries = 0
        self._forward_seconds = 0.0

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()

    async def restore(self, op_id: int) -> None:
        """Brings the present learner to `op_id`: load or create, then replay. Waits as long as it takes."""
        async with self._lock:
            with self._waits.on("learner", "the learner to be up and at its last operation"):
                while not await self._try_restore(op_id):
                    await self._registry.changed(0.5)
            self._acknowledged(op_id)

    async def forward_backward(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        """Adds gradients of a logged batch; whether they are an adapter's is the source's matter, not the log's."""
        request.adapter = self._source.adapter
        with self._waits.on("train", "the learner's ForwardBackward"):
            answer = await self._call(lambda stub: stub.ForwardBackward(request, timeout=oplog.COMPUTE_SECONDS))
        self._acknowledged(request.op_id)
        return answer

    async def reference_logprobs(self, groups: Sequence[pb.PromptGroup]) -> Sequence[pb.PromptGroup]:
        """The groups with the reference's log-probs as `behaviour_logprobs`."""
        return await self._forward(pb.ForwardRequest(groups=groups, reference=True))

    async def values(self, groups: Sequence[pb.PromptGroup]) -> Sequence[pb.PromptGroup]:
        """The groups with the critic's values as `behaviour_logprobs`."""
        return await self._forward(pb.ForwardRequest(groups=groups, values=True))

    async def _forward(self, request: pb.ForwardRequest) -> Sequence[pb.PromptGroup]:
        request.model_id, request.adapter = self._source.model_id, self._source.adapter
        with self._waits.on("train", "the learner's Forward"):
            answer = await self._call(lambda stub: stub.Forward(request, timeout=oplog.COMPUTE_SECONDS))
        self._forward_seconds += answer.seconds
        return answer.groups

    def drain_forward_seconds(self) -> float:
        """Seconds that the learner computed without a gradient since the last call."""
        seconds, self._forward_seconds = self._forward_seconds, 0.0
        return seconds

    async def optim_step(self, request: pb.OptimStepRequest) -> pb.OptimStepResponse:
        """Applies the gradients of a logged step."""
        request.adapter = self._source.adapter
        with self._waits.on("train", "the learner's OptimStep"):
            answer = await self._call(lambda stub: stub.OptimStep(request, timeout=oplog.COMPUTE_SECONDS))
        self._acknowledged(request.op_id)
        self.version = answer.version
        return answer

    def _acknowledged(self, op_id: int) -> None:
        # A restore that a publish or a save began may end after a later operation was acknowledged.
        self.op_id = max(self.op_id, op_id)

    async def publish(
        self, sync_timeout_seconds: float, request_id: str, probe_token_ids: Sequence[int] = ()
    ) -> pb.PublishWeightsResponse:
        """Distributes the present weights. Raises LearnerFailed with the receiver's text.

        The replicas have the timeout to prepare and again to commit. The same `request_id` joins a call that is still
        under way; after a failure whose outcome is known it must be a new one.
        """
        request = pb.PublishWeightsRequest(
            request_id=request_id,
            model_id=self._source.model_id,
            sync_timeout_seconds=sync_timeout_seconds,
            min_replicas=1,
            probe_token_ids=probe_token_ids,
            adapter=self._source.adapter if self._source.factors else "",
            merged_adapter="" if self._source.factors else self._source.adapter,
        )
        seconds = 2 * sync_timeout_seconds + _PUBLISH_SLACK_SECONDS
        return await self._call(lambda stub: stub.PublishWeights(request, timeout=seconds))

    async def save_state(self, store_url: str, prefix: str) -> pb.SaveStateResponse:
        """Streams the state to the object store; the caller sends no operation meanwhile."""
        source = self._source
        request = pb.SaveStateRequest(
            model_id=source.model_id, store_url=store_url, prefix=prefix, adapter=source.adapter
        )
        return await self._call(lambda stub: stub.SaveState(request, timeout=_LOAD_SECONDS))

    async def _call(self, send: Callable[["LearnerServiceAsyncStub"], Awaitable[Answer]]) -> Answer:
        while True:
            entry = self._entry
            try:
                assert self._stub is not None
                return await send(self._stub)
            except grpc.aio.AioRpcError as error:
                # A status with a reason was sent by a living learner, for example because the broker is away.
                broken = error.code() in _LOST and not reason_of(error)
                if not broken and entry == self._registry.get(self._source.model_id):
                    raise LearnerFailed(error) from None
                log.warning("the learner of %s is gone (%s), waiting for it", self._source.model_id, error.code().name)
                self.recoveries += 1
                await self.restore(self.op_id)

    async def _try_restore(self, op_id: int) -> bool:
        entry = self._registry.get(self._source.model_id)
        if entry is None:
            return False
        try:
            await self._connect(entry)
            assert self._stub is not None
            present = await self._present(self._stub)
            at = await self._load(self._stub) if present is None else present[0]
            if at < op_id:
                log.info("replaying operations %d to %d of %s", at + 1, op_id, self._source.model_id)
                logged = await self._ledger.operations(at, op_id)
                await oplog.replay(self._stub, logged, self._waits.progress, self._source.adapter)
            present = await self._present(self._stub)
            if present is None:
                return False
            self.version = present[1]
        except grpc.aio.AioRpcError as error:
            if error.code() in (*_LOST, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            raise LearnerFailed(error) from None
        return True

    async def _present(self, stub: "LearnerServiceAsyncStub") -> tuple[int, int] | None:
        """Operation and version of what the run trains, None when the learner does not have it."""
        status = await stub.GetLearner(pb.GetLearnerRequest(), timeout=_STATUS_SECONDS)
        if status.model_id != self._source.model_id:
            return None
        if not self._source.adapter:
            return status.op_id, status.version
        return next(((each.op_id, each.version) for each in status.adapters if each.name == self._source.adapter), None)

    async def _load(self, stub: "LearnerServiceAsyncStub") -> int:
        """Makes the model from the newest checkpoint that can be read, or from nothing; returns its operation."""
        source, checkpoint = self._source, await self._latest_checkpoint()
        while checkpoint is not None:
            try:
                return await self._load_checkpoint(stub, checkpoint)
            except grpc.aio.AioRpcError as error:
                if reason_of(error) not in _DAMAGED:
                    raise
                log.error("%s cannot be loaded (%s), reading it back", checkpoint.name, error.details())
                await self._scrub_checkpoint(checkpoint.name)
                found = await self._latest_checkpoint()
                if found is not None and found.name == checkpoint.name:
                    raise  # its objects are as they were written: the cause is another one
                checkpoint = found
        await stub.CreateModel(self._source.creation(), timeout=_LOAD_SECONDS)
        if source.adapter:
            await stub.CreateAdapter(source.adapter_creation(), timeout=_LOAD_SECONDS)
        return 0

    async def _load_checkpoint(self, stub: "LearnerServiceAsyncStub", checkpoint: checkpoint_pb2.Checkpoint) -> int:
        log.info("loading %s", checkpoint.name)
        if self._source.adapter:
            return await self._load_adapter(stub, checkpoint)
        loading = self._source.loading(checkpoint)
        return (await stub.LoadState(loading, timeout=_LOAD_SECONDS)).op_id

    async def _load_adapter(self, stub: "LearnerServiceAsyncStub", checkpoint: checkpoint_pb2.Checkpoint) -> int:
        await stub.CreateModel(self._source.creation(), timeout=_LOAD_SECONDS)
        loading = pb.LoadStateRequest(
            model_id=self._source.model_id,
            store_url=checkpoint.store_url,
            objects=checkpoint.objects,
            adapter=self._source.adapter,
            epoch=0 if self._source.factors else checkpoint.cursor.epoch,
        )
        return (await stub.LoadState(loading, timeout=_LOAD_SECONDS)).op_id

    async def _connect(self, entry: LearnerEntry) -> None:
        if entry == self._entry:
            return
        await self.close()
        self._entry = entry
        self._channel = open_channel(entry.address, self._settings, subject="trainer", max_message_mib=MAX_BATCH_MIB)
        self._stub = LearnerServiceStub(self._channel)
