"""Draws the samples of one prompt through the inference gateway."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reflux.common.v1 import common_pb2
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_trainer.clients.retry import Refused, patiently
from reflux_trainer.queue.records import Sample, Span

if TYPE_CHECKING:
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub


class Generator:
    """Groups of one model."""

    def __init__(
        self, stub: "InferenceGatewayServiceAsyncStub", model_id: str, *, max_tokens: int, stop_token_ids: Sequence[int]
    ) -> None:
        self._stub = stub
        self._model_id = model_id
        self._max_tokens = max_tokens
        self._stops = list(stop_token_ids)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        *,
        temperature: float,
        seed: int,
        min_version: int,
        seconds: float,
    ) -> list[Sample]:
        """All samples of a prompt in the order of their index. Raises PeerAway or Refused.

        A broken stream starts over: seed and index fix each sample, so that nothing is drawn twice differently.
        """
        request = pb.GenerateGroupRequest(
            request_id=request_id,
            model_id=self._model_id,
            prompt_token_ids=prompt_token_ids,
            num_samples=num_samples,
            sampling=common_pb2.SamplingParams(
                max_tokens=self._max_tokens, temperature=temperature, seed=seed, stop_token_ids=self._stops
            ),
            min_version=min_version,
        )

        async def attempt(seconds_left: float) -> dict[int, Sample]:
            stream = self._stub.GenerateGroup(request, timeout=seconds_left)
            return {answer.sample.index: _sample(answer) async for answer in stream}

        samples = await patiently("the inference gateway", seconds, attempt)
        if sorted(samples) != list(range(num_samples)):
            raise Refused(f"the gateway sent samples {sorted(samples)} of {num_samples}")
        return [samples[index] for index in range(num_samples)]


def _sample(answer: pb.GenerateGroupResponse) -> Sample:
    sample = answer.sample
    return Sample(
        token_ids=list(sample.token_ids),
        logprobs=list(sample.logprobs),
        finish_reason=sample.finish_reason,
        versions=[Span(span.version, span.start, span.end) for span in sample.versions],
        replica=answer.replica,
    )
