"""The gRPC face of the engine: translates messages, delegates to the loop."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from reflux.common.v1.common_pb2 import Sample, TokenScores, VersionSpan
from reflux.inference_gateway.v1 import engine_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceServicer
from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.engine.attendance import Attendance
from reflux_inference_gateway.engine.lanes import OWN
from reflux_inference_gateway.engine.legs import Legs, ticket_fields, ticket_message
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.probing import live_fingerprint
from reflux_inference_gateway.engine.types import (
    EngineStopped,
    FinishedSample,
    GroupRequest,
    ModelLimits,
    QueueFull,
    Sampling,
)
from reflux_inference_gateway.wire import parse_num_samples, parse_prompt, parse_request_id, parse_sampling
from reflux_kit import telemetry
from reflux_kit.errors import CapacityExhausted, InvalidRequest, Unavailable, WrongState
from reflux_model.errors import UnsupportedModelError
from reflux_model.lora import LoraSpec, TargetGroup

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EngineService"].full_name
_TOKENS_PER_MESSAGE = 100_000
_ADAPTER = re.compile(r"[A-Za-z0-9._-]{1,128}/adapters/[a-z0-9_-]{1,64}")
_MAX_LEASE_SECONDS = 3600.0


class EngineServicer(EngineServiceServicer):
    """Generate, abort, status, and what lies in memory."""

    def __init__(
        self,
        engine: EngineLoop,
        limits: ModelLimits,
        describe: Callable[[], ReplicaMessage],
        attendance: Attendance,
        legs: Legs,
    ) -> None:
        """`describe` gives the replica as it reports itself to the gateway."""
        self._attendance, self._seats, self._own = attendance, attendance.seats, describe().model_id
        self._legs = legs
        self._engine = engine
        self._limits = limits
        self._describe = describe

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        group = replace(parse_generate(request, self._limits), model=self._model(request.model_id))
        collected: list[Sample] = []
        if request.HasField("ticket"):
            given = await self._legs.given(group.prompt_ids, ticket_fields(request.ticket), group.model)
            group = replace(group, given=given)
            yield pb.GenerateResponse(pull=pb.GenerateResponse.PULL_USED if given else pb.GenerateResponse.PULL_FAILED)
        with telemetry.span("engine.generate", samples=group.num_samples, prompt_tokens=len(group.prompt_ids)):
            try:
                async with aclosing(self._engine.generate(group)) as batches:
                    async for batch in batches:
                        collected += [_sample(event) for event in batch if isinstance(event, FinishedSample)]
                        if collected and not request.whole_group:
                            yield pb.GenerateResponse(samples=collected)
                            collected = []
            except QueueFull as error:
                raise CapacityExhausted(str(error)) from error
            except EngineStopped as error:
                raise Unavailable(str(error)) from error
        for part in _parts(sorted(collected, key=lambda sample: sample.index)):
            yield pb.GenerateResponse(samples=part)

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        request_id, prompt = parse_prefill(request, self._limits)
        try:
            with telemetry.span("engine.prefill", prompt_tokens=len(prompt)):
                ticket = await self._legs.prefill(request_id, prompt, self._model(request.model_id))
        except QueueFull as error:
            raise CapacityExhausted(str(error)) from error
        except EngineStopped as error:
            raise Unavailable(str(error)) from error
        return pb.PrefillResponse(ticket=ticket_message(ticket))

    async def ReleasePrompt(self, request: pb.ReleasePromptRequest, context: Any) -> pb.ReleasePromptResponse:
        await self._legs.release(request.generation)
        return pb.ReleasePromptResponse()

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        if not request.role or request.role not in ReplicaMessage.Role.values():
            raise InvalidRequest(f"role must be prefill, decode or both, got {request.role}", field="role")
        load = self._engine.load()
        if sequences := load.running + load.waiting:
            raise WrongState(f"{sequences} sequences run or wait; the role changes when there are none")
        self._attendance.set_role(request.role)
        return pb.SetRoleResponse(replica=self._describe())

    async def AbortRequests(self, request: pb.AbortRequestsRequest, context: Any) -> pb.AbortRequestsResponse:
        model = self._model(request.model_id)
        aborted = [request_id for request_id in request.request_ids if self._engine.abort(request_id, model)]
        return pb.AbortRequestsResponse(aborted_ids=aborted)

    async def GetFingerprint(self, request: pb.GetFingerprintRequest, context: Any) -> pb.GetFingerprintResponse:
        epoch, fingerprint = await live_fingerprint(self._engine, request.adapter)
        return pb.GetFingerprintResponse(epoch=epoch, fingerprint=fingerprint)

    async def ScorePrompt(self, request: pb.ScorePromptRequest, context: Any) -> pb.ScorePromptResponse:
        token_ids = parse_score(request, self._limits)
        try:
            scored = await asyncio.wrap_future(self._engine.score(token_ids, self._model(request.model_id)))
        except EngineStopped as error:
            raise Unavailable(str(error)) from error
        return pb.ScorePromptResponse(logprobs=scored.logprobs, version=scored.version, epoch=scored.epoch)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(replica=self._describe())

    async def AttachAdapter(self, request: pb.AttachAdapterRequest, context: Any) -> pb.AttachAdapterResponse:
        name, spec, lease_seconds = parse_attach(request)
        await self._seats.attach(name, spec, lease_seconds)
        return pb.AttachAdapterResponse()

    async def DetachAdapter(self, request: pb.DetachAdapterRequest, context: Any) -> pb.DetachAdapterResponse:
        await self._seats.detach(request.model_id)
        return pb.DetachAdapterResponse()

    def _model(self, model_id: str) -> str:
        return OWN if model_id == self._own else model_id


def parse_attach(request: pb.AttachAdapterRequest) -> tuple[str, LoraSpec, float]:
    """Model id, shape and lease of an adapter; raises InvalidRequest naming the field."""
    if not _ADAPTER.fullmatch(request.model_id):
        raise InvalidRequest("model_id must be <model>/adapters/<adapter>", field="model_id")
    wanted: dict[TargetGroup, bool] = {
        "attention": request.train_attention,
        "mlp": request.train_mlp,
        "unembed": request.train_unembed,
    }
    if not 0 < request.lease_seconds <= _MAX_LEASE_SECONDS:
        raise InvalidRequest(f"lease_seconds must be above 0, at most {_MAX_LEASE_SECONDS:g}", field="lease_seconds")
    try:
        spec = LoraSpec(rank=request.rank, groups=tuple(group for group in wanted if wanted[group]))
    except UnsupportedModelError as error:
        raise InvalidRequest(str(error), field="rank") from None
    return request.model_id, spec, request.lease_seconds


def parse_score(request: pb.ScorePromptRequest, limits: ModelLimits) -> tuple[int, ...]:
    """Checks a ScorePrompt request against the model; raises InvalidRequest naming the field and the limit."""
    token_ids = tuple(request.token_ids)
    if not 2 <= len(token_ids) <= limits.max_model_len:
        raise InvalidRequest(
            f"token_ids must have 2 to {limits.max_model_len} ids, got {len(token_ids)}", field="token_ids"
        )
    if max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"token_ids holds {max(token_ids)}; the vocabulary ends at {limits.vocab_size - 1}", field="token_ids"
        )
    return token_ids


def parse_prefill(request: pb.PrefillRequest, limits: ModelLimits) -> tuple[str, tuple[int, ...]]:
    """Id and prompt of a Prefill request; raises InvalidRequest naming the field and the limit."""
    prompt = _known(parse_prompt(request.prompt_token_ids), limits)
    if not 2 <= len(prompt) < limits.max_model_len:
        raise InvalidRequest(
            f"prompt_token_ids must have 2 to {limits.max_model_len - 1} ids, got {len(prompt)}",
            field="prompt_token_ids",
        )
    return parse_request_id(request.request_id), prompt


def parse_generate(request: pb.GenerateRequest, limits: ModelLimits) -> GroupRequest:
    """Checks a Generate request against the model; raises InvalidRequest naming the field and the limit."""
    prompt = _known(parse_prompt(request.prompt_token_ids), limits)
    sampling = parse_sampling(request.sampling)
    if len(prompt) + sampling.max_tokens > limits.max_model_len:
        raise InvalidRequest(
            f"{len(prompt)} prompt tokens and sampling.max_tokens {sampling.max_tokens} exceed the context of "
            f"{limits.max_model_len}",
            field="sampling.max_tokens",
        )
    return GroupRequest(
        request_id=parse_request_id(request.request_id),
        prompt_ids=prompt,
        num_samples=parse_num_samples(request.num_samples),
        sampling=Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            stops=tuple(sampling.stops),
            ignore_eos=sampling.ignore_eos,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
    )


def _known(prompt: tuple[int, ...], limits: ModelLimits) -> tuple[int, ...]:
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequest(
            f"prompt_token_ids holds {max(prompt)}; the vocabulary ends at {limits.vocab_size - 1}",
            field="prompt_token_ids",
        )
    return prompt


def _sample(sample: FinishedSample) -> Sample:
    return Sample(
        index=sample.index,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        versions=[
            VersionSpan(version=span.version, start=span.start, end=span.end, kv_version=span.kv_version)
            for span in sample.spans
        ],
        top_logprobs=[TokenScores(token_ids=top.keys(), logprobs=top.values()) for top in sample.top_logprobs],
        prompt_scores=[
            TokenScores(token_ids=scores.keys(), logprobs=[score.logprob for score in scores.values()])
            for scores in sample.prompt_scores
        ],
    )


def _parts(samples: list[Sample]) -> list[list[Sample]]:
    """One list, or several when a single message would exceed gRPC's limit of 4 MiB."""
    parts: list[list[Sample]] = []
    tokens = _TOKENS_PER_MESSAGE
    for sample in samples:
        if tokens + len(sample.token_ids) > _TOKENS_PER_MESSAGE:
            parts.append([])
            tokens = 0
        parts[-1].append(sample)
        tokens += len(sample.token_ids)
    return parts
