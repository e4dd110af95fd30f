"""The embedded engine over gRPC: one message per group when the caller wants the whole group."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from reflux.common.v1.common_pb2 import Sample, SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2 import KvTicket
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub
from reflux_inference_gateway.dispatch import ReplicaLost
from reflux_inference_gateway.engine.types import sample_seed
from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.errors import Overloaded
from reflux_inference_gateway.wire import GroupCall
from reflux_kit.channel import open_channel
from reflux_kit.errors import DeadlinePassed, InvalidRequest
from reflux_kit.settings import ServiceSettings

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

log = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,  # what the kit answers for an exception that nobody expected: a 5xx
)


class TorchReplica(ReplicaClient):
    """Owns the channel to one `reflux-engine`."""

    def __init__(self, address: str, model_id: str, settings: ServiceSettings) -> None:
        """`model_id` is one of those that the process at `address` serves."""
        self._address, self._model_id = address, model_id
        self._channel = open_channel(address, settings, subject="inference-gateway")
        self._stub: EngineServiceAsyncStub = EngineServiceStub(self._channel)

    async def generate(
        self, call: GroupCall, deadline_seconds: float | None, serving: Callable[[], int]
    ) -> AsyncGenerator[Sequence[Sample], None]:
        request = pb.GenerateRequest(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            num_samples=call.num_samples,
            sampling=_sampling(call),
            whole_group=call.whole_group,
            model_id=self._model_id,
            ticket=call.handed.ticket if call.handed else None,
        )
        missing = call.num_samples
        answer = self._stub.Generate(request, timeout=deadline_seconds)
        try:
            async for response in answer:
                if response.pull and call.handed:
                    call.handed.pulled(response.pull == response.PULL_USED)
                    continue
                missing -= len(response.samples)
                if call.first_sample:
                    for sample in response.samples:
                        sample.index += call.first_sample
                yield response.samples
        except aio.AioRpcError as error:
            raise self._translated(error) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise ReplicaLost(f"the connection to {self._address} was closed") from None  # by `close`, nobody left
        finally:
            answer.cancel()  # who closes this generator between two messages leaves a call that nobody else ends
        if missing:
            raise ReplicaLost(f"{self._address} ended the stream with {missing} samples missing")

    async def prefill(self, call: GroupCall, deadline_seconds: float) -> KvTicket | None:
        """Computes the prompt for another replica; None when its memory for such prompts is full."""
        request = pb.PrefillRequest(
            request_id=call.request_id, prompt_token_ids=call.prompt_token_ids, model_id=self._model_id
        )
        try:
            response = await self._stub.Prefill(request, timeout=deadline_seconds)
        except aio.AioRpcError as error:
            raise self._translated(error) from error
        return response.ticket if response.HasField("ticket") else None

    async def release(self, generation: int) -> None:
        """Frees a prompt that `prefill` computed; when the call is lost its lease does."""
        try:
            await self._stub.ReleasePrompt(pb.ReleasePromptRequest(generation=generation), timeout=_ABORT_SECONDS)
        except aio.AioRpcError as error:
            log.info("%s did not hear that a prompt was read: %s", self._address, error.details())

    async def abort(self, request_id: str) -> None:
        try:
            request = pb.AbortRequestsRequest(request_ids=[request_id], model_id=self._model_id)
            await self._stub.AbortRequests(request, timeout=_ABORT_SECONDS)
        except aio.AioRpcError as error:  # its requests end with it
            log.warning("%s did not hear of the abort of %s: %s", self._address, request_id, error.details())

    async def close(self) -> None:
        await self._channel.close()

    def _translated(self, error: aio.AioRpcError) -> Exception:
        text = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(text)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Overloaded(text)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlinePassed(text)
            case _ if error.code() in _LOST:
                return ReplicaLost(f"{self._address}: {text}")
        return error


def _sampling(call: GroupCall) -> SamplingParams:
    """The group's, or with the seed that makes the first sample of the share draw what it draws in the group."""
    if not call.first_sample:
        return call.sampling
    sampling = SamplingParams()
    sampling.CopyFrom(call.sampling)
    sampling.seed = sample_seed(call.sampling.seed, call.first_sample)
    return sampling
