"""From LearnerService requests to values; every refusal names the field, the value and what would work."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_model.config import ModelConfig
from reflux_trainer.algo.aggregation import AGGREGATIONS, Aggregation
from reflux_trainer.algo.kl import ESTIMATORS, Estimator
from reflux_trainer.learner.folders import Source
from reflux_trainer.learner.numerics import COMPUTE_DTYPES, Numerics
from reflux_trainer.learner.ops import LOSSES, CompletionData, GroupData, LossName, LossSpec, StepSpec
from reflux_trainer.learner.publish import WEIGHT_DTYPES, Outlet, PublishOrder
from reflux_transfer.registry import BACKENDS

_PER_TOKEN = (
    "behaviour_logprobs",
    "mask",
    "advantages",
    "proximal_logprobs",
    "reference_logprobs",
    "returns",
    "values",
)
_LOSS_NUMBERS = (
    "tis_cap",
    "mis_low",
    "mis_high",
    "kl_coefficient",
    "dro_beta",
    "dual_clip_bound",
    "value_coefficient",
    "value_clip",
)
_ADAPTER = re.compile(r"[a-z0-9_-]{1,64}")
_DEFAULT_EPS = 1e-8
_DEFAULT_SYNC_SECONDS = 60.0
_DEFAULT_DUAL_CLIP_BOUND = 3.0


def parse_model_id(model_id: str) -> str:
    """A non-empty model id."""
    if not model_id:
        raise InvalidRequest("model_id is required")
    return model_id


def parse_op_id(op_id: int) -> int:
    """A positive operation number."""
    if op_id < 1:
        raise InvalidRequest(f"op_id must be 1 or more, got {op_id}")
    return op_id


def parse_source(request: pb.CreateModelRequest | pb.LoadStateRequest) -> Source:
    """A model folder's path, whose completeness is found on loading, and how passes are computed."""
    if not request.path or "\0" in request.path:
        raise InvalidRequest("path must name a model folder in Hugging Face layout")
    dtype = request.compute_dtype or "float32"
    if dtype not in COMPUTE_DTYPES:
        raise InvalidRequest(f"compute_dtype {dtype!r} is not one of {', '.join(COMPUTE_DTYPES)}")
    numerics = Numerics(
        dtype=COMPUTE_DTYPES[dtype],
        recompute=request.gradient_checkpointing,
        deterministic=request.deterministic,
    )
    return Source(Path(request.path), request.seed, numerics)


def parse_outlet(request: pb.CreateModelRequest | pb.LoadStateRequest) -> Outlet:
    """How weights are published: over a known transport, in a known type (float32 when nobody said)."""
    transport, dtype = request.transport, request.weight_dtype or "float32"
    if transport not in (known := ("auto", *BACKENDS)):
        raise InvalidRequest(f"transport {transport!r} is not one of {', '.join(known)}")
    if dtype not in WEIGHT_DTYPES:
        raise InvalidRequest(f"weight_dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    if request.weight_delta and dtype != "bfloat16":
        raise InvalidRequest(f"weight_delta needs weight_dtype 'bfloat16': {dtype} weights change everywhere")
    return Outlet(transport, WEIGHT_DTYPES[dtype], request.weight_delta)


def parse_adapter(name: str) -> str:
    """An adapter's name."""
    if not _ADAPTER.fullmatch(name):
        raise InvalidRequest(f"adapter needs 1 to 64 of a-z, 0-9, - and _, got {name[:80]!r}", field="adapter")
    return name


def parse_publish(request: pb.PublishWeightsRequest, config: ModelConfig) -> PublishOrder:
    """A publish; the probe prompt is empty or has two tokens at least."""
    if not request.request_id:
        raise InvalidRequest("request_id is required: a UUID that makes retries safe")
    if request.sync_timeout_seconds < 0:
        raise InvalidRequest(f"sync_timeout_seconds must be 0 or more, got {request.sync_timeout_seconds}")
    if request.adapter:
        parse_adapter(request.adapter)
    _check_beside(request)
    probe = request.probe_token_ids
    if probe:
        check_ids("probe_token_ids", probe, config)
        if not 2 <= len(probe) <= config.max_positions:
            raise InvalidRequest(f"probe_token_ids must have 2 to {config.max_positions} ids, got {len(probe)}")
    return PublishOrder(
        request_id=request.request_id,
        sync_timeout_seconds=request.sync_timeout_seconds or _DEFAULT_SYNC_SECONDS,
        min_replicas=request.min_replicas,
        probe_token_ids=tuple(probe),
        adapter=request.adapter,
        publish_as=request.publish_as,
        version=request.version,
        merged_adapter=request.merged_adapter,
    )


def _check_beside(request: pb.PublishWeightsRequest) -> None:
    if not request.publish_as and (request.merged_objects or request.version):
        raise InvalidRequest("version and merged_objects need publish_as: the model that gets the weights")
    if request.adapter and request.merged_adapter:
        raise InvalidRequest("adapter and merged_adapter exclude each other")
    if request.publish_as and (request.adapter or request.probe_token_ids or request.publish_as == request.model_id):
        raise InvalidRequest("publish_as names another model than model_id, without adapter and probe_token_ids")
    if request.merged_adapter and request.merged_objects:
        raise InvalidRequest("merged_adapter and merged_objects exclude each other")
    if request.merged_adapter:
        parse_adapter(request.merged_adapter)
    if request.version < 0:
        raise InvalidRequest(f"version must be 0 or more, got {request.version}")


def parse_loss(loss: pb.LossConfig) -> LossSpec:
    """Loss and constants."""
    if loss.name not in LOSSES:
        raise InvalidRequest(f"loss.name {loss.name!r} is not one of {', '.join(LOSSES)}")
    if loss.aggregation not in AGGREGATIONS:
        raise InvalidRequest(f"loss.aggregation {loss.aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
    if loss.aggregation == "constant" and loss.constant_length == 0:
        raise InvalidRequest("loss.aggregation 'constant' needs loss.constant_length, for example the token limit")
    _within("loss.clip_low", loss.clip_low, 0.0, 1.0)
    _within("loss.clip_high", loss.clip_high, 0.0, 1e6)
    for name in _LOSS_NUMBERS:
        _within(f"loss.{name}", getattr(loss, name), 0.0, 1e6)
    if loss.mis_high < loss.mis_low:
        raise InvalidRequest(f"loss.mis_high {loss.mis_high} lies below loss.mis_low {loss.mis_low}")
    if (estimator := loss.kl_estimator or "k3") not in ESTIMATORS:
        raise InvalidRequest(f"loss.kl_estimator {estimator!r} is not one of {', '.join(ESTIMATORS)}")
    return LossSpec(
        name=cast(LossName, loss.name),
        aggregation=cast(Aggregation, loss.aggregation),
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip_bound=loss.dual_clip_bound or _DEFAULT_DUAL_CLIP_BOUND,
        tis_cap=loss.tis_cap,
        mis_low=loss.mis_low,
        mis_high=loss.mis_high,
        correction_level="sequence" if loss.correction_per_sequence else "token",
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=cast(Estimator, estimator),
        own_reference=loss.own_reference,
        value_coefficient=loss.value_coefficient,
        value_clip=loss.value_clip,
        dro_beta=loss.dro_beta,
        constant_length=loss.constant_length,
    )


def parse_step(request: pb.OptimStepRequest) -> StepSpec:
    """Constants of AdamW."""
    for name in ("learning_rate", "critic_learning_rate"):
        _within(name, getattr(request, name), 0.0, 1e3)
    for name, beta in (("beta1", request.beta1), ("beta2", request.beta2)):
        if not 0.0 <= beta < 1.0:
            raise InvalidRequest(f"{name} must be in [0, 1), got {beta}")
    _within("eps", request.eps, 0.0, 1.0)
    _within("weight_decay", request.weight_decay, 0.0, 1e3)
    _within("max_grad_norm", request.max_grad_norm, 0.0, math.inf)
    return StepSpec(
        learning_rate=request.learning_rate,
        beta1=request.beta1,
        beta2=request.beta2,
        eps=request.eps or _DEFAULT_EPS,
        weight_decay=request.weight_decay,
        max_grad_norm=0.0 if math.isinf(request.max_grad_norm) else request.max_grad_norm,
        critic_learning_rate=request.critic_learning_rate,
        reset_optimizer=request.reset_optimizer,
    )


def parse_groups(groups: Sequence[pb.PromptGroup], config: ModelConfig) -> list[GroupData]:
    """Groups whose ids and lengths fit the model. An advantage that is not finite passes: the step refuses it."""
    if not groups:
        raise InvalidRequest("groups must hold at least one prompt with a completion")
    return [_group(f"groups[{index}]", group, config) for index, group in enumerate(groups)]


def _group(where: str, group: pb.PromptGroup, config: ModelConfig) -> GroupData:
    check_ids(f"{where}.prompt_token_ids", group.prompt_token_ids, config)
    if not group.completions:
        raise InvalidRequest(f"{where}.completions must not be empty")
    room = config.max_positions - len(group.prompt_token_ids)
    completions = []
    for index, completion in enumerate(group.completions):
        name = f"{where}.completions[{index}]"
        check_ids(f"{name}.token_ids", completion.token_ids, config)
        count = len(completion.token_ids)
        if count > room:
            raise InvalidRequest(f"{name} has {count} tokens, the model's {config.max_positions} leave {max(0, room)}")
        for field in _PER_TOKEN:
            if (entries := len(getattr(completion, field))) not in (0, count):
                raise InvalidRequest(f"{name}.{field} has {entries} entries for {count} tokens")
        completions.append(
            CompletionData(
                token_ids=list(completion.token_ids),
                sampler_logprobs=list(completion.behaviour_logprobs),
                advantage=completion.advantage,
                mask=[bool(value) for value in completion.mask],
                advantages=list(completion.advantages),
                proximal_logprobs=list(completion.proximal_logprobs),
                reference_logprobs=list(completion.reference_logprobs),
                returns=list(completion.returns),
                values=list(completion.values),
            )
        )
    return GroupData(list(group.prompt_token_ids), completions)


def check_ids(where: str, ids: Sequence[int], config: ModelConfig) -> None:
    """Raises `InvalidRequest` for no ids, or one that the vocabulary lacks."""
    if not ids:
        raise InvalidRequest(f"{where} must not be empty")
    if max(ids) >= config.vocab_size:
        raise InvalidRequest(f"{where} holds id {max(ids)}, the vocabulary has {config.vocab_size} entries")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low:g} to {high:g}, got {value}")
