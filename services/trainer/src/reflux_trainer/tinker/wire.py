"""Protobuf bodies of the API to the learner's and the gateway's messages and back. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from reflux.common.v1 import common_pb2
from reflux.trainer.v1 import learner_service_pb2 as learner_pb
from reflux.trainer.v1 import tinker_pb2 as pb
from reflux_kit.errors import InvalidRequest

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro")
_DTYPES: Mapping[int, str] = {
    pb.TINKER_DTYPE_FLOAT32: "<f4",
    pb.TINKER_DTYPE_INT64: "<i8",
    pb.TINKER_DTYPE_INT32: "<i4",
    pb.TINKER_DTYPE_BFLOAT16: "<u2",
}
_WEIGHING = ("weights", "advantages", "logprobs")
"""Arrays that the learner reads."""
_NOT_SERVED = ("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
"""Arrays that would change the loss and that nobody reads here: to ignore them would be a wrong answer."""
_CLIP_LOW, _CLIP_HIGH, _BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_DEFAULT_CLIP = {_CLIP_LOW: 0.8, _CLIP_HIGH: 1.2}
_DEFAULT_BETA = 0.05
_NO_LOGPROB = -99999.0


def parse_forward_backward(raw: bytes) -> pb.TinkerForwardBackwardRequest:
    """The body of forward_backward; its content is judged when it is executed. Raises `InvalidRequest`."""
    try:
        request = pb.TinkerForwardBackwardRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the body is not a ForwardBackwardRequest in protobuf", field="body") from None
    if not request.model_id or request.seq_id < 1:
        raise InvalidRequest("model_id and a seq_id from 1 on are required", field="seq_id")
    return request


def learner_batch(request: pb.TinkerForwardBackwardRequest) -> list[learner_pb.Datum]:
    """The datums as the learner takes them. Raises `InvalidRequest` naming datum and field."""
    if not request.data:
        raise InvalidRequest("data must hold at least one datum", field="data")
    return [_datum(f"data[{index}]", datum) for index, datum in enumerate(request.data)]


def loss_config(request: pb.TinkerForwardBackwardRequest) -> learner_pb.LossConfig:
    """The loss with its constants; values are summed over tokens, as the API says. Raises `InvalidRequest`."""
    name = request.loss_fn
    if name not in LOSSES:
        raise InvalidRequest(f"loss_fn {name[:40]!r} is not one of {', '.join(LOSSES)}", field="loss_fn")
    numbers = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise InvalidRequest(f"loss_fn_config.{key} must be a number", field="loss_fn_config")
        numbers[key] = value.number
    unknown = sorted(set(numbers) - {_CLIP_LOW, _CLIP_HIGH, _BETA})
    if unknown:
        known = ", ".join((_CLIP_LOW, _CLIP_HIGH, _BETA))
        raise InvalidRequest(f"loss_fn_config.{unknown[0]} is not one of {known}", field="loss_fn_config")
    low, high = (numbers.get(key, default) for key, default in _DEFAULT_CLIP.items())
    if not (0.0 <= low <= 1.0 <= high <= 1e6):
        raise InvalidRequest(
            f"{_CLIP_LOW} and {_CLIP_HIGH} bound the ratio, 0 <= low <= 1 <= high; got {low:g} and {high:g}",
            field="loss_fn_config",
        )
    return learner_pb.LossConfig(
        name=name,
        clip_low=1.0 - low,
        clip_high=high - 1.0,
        aggregation="sum",
        dro_beta=numbers.get(_BETA, _DEFAULT_BETA),
    )


def _datum(where: str, datum: pb.TinkerDatum) -> learner_pb.Datum:
    parts = []
    for number, chunk in enumerate(datum.model_input):
        if not chunk.HasField("encoded_text"):
            raise InvalidRequest(f"{where}.model_input[{number}] is not encoded_text: only text is served", field=where)
        parts.append(_array(f"{where}.model_input[{number}]", chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    for name in _NOT_SERVED:
        if name in datum.loss_fn_inputs:
            raise InvalidRequest(f"{where}.loss_fn_inputs.{name} is not served; set it in loss_fn_config", field=where)
    if "target_tokens" not in datum.loss_fn_inputs:
        raise InvalidRequest(f"{where}.loss_fn_inputs.target_tokens is required", field=where)
    targets = _tensor(f"{where}.loss_fn_inputs.target_tokens", datum.loss_fn_inputs["target_tokens"])
    if len(targets) != len(tokens):
        raise InvalidRequest(f"{where} has {len(tokens)} input tokens and {len(targets)} target_tokens", field=where)
    for name, ids in (("model_input", tokens), ("target_tokens", targets)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= 1 << 31):
            raise InvalidRequest(f"{where}.{name} holds ids that are negative or too large", field=where)
    message = learner_pb.Datum(token_ids=tokens.tolist(), target_token_ids=targets.astype(np.int64).tolist())
    for name in _WEIGHING:
        if name in datum.loss_fn_inputs:
            values = _tensor(f"{where}.loss_fn_inputs.{name}", datum.loss_fn_inputs[name]).astype(np.float32)
            if len(values) != len(targets):
                raise InvalidRequest(
                    f"{where}.{name} has {len(values)} entries for {len(targets)} targets", field=where
                )
            message.arrays.add(name=name, values=values.tolist())
    return message


def _tensor(where: str, tensor: pb.TinkerTensor) -> NDArray[np.generic]:
    sizes = [size for size in tensor.shape if size != 1]
    if tensor.HasField("sparse_csr") or len(sizes) > 1:
        raise InvalidRequest(f"{where} must be a dense vector: distributions over targets are not served", field=where)
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(f"{where}.dtype {tensor.dtype} is not known", field=where)
    values = _array(where, tensor.dense, _DTYPES[tensor.dtype])
    if tensor.dtype == pb.TINKER_DTYPE_BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _array(where: str, raw: bytes, dtype: str) -> NDArray[np.generic]:
    kind = np.dtype(dtype)
    if len(raw) % kind.itemsize:
        raise InvalidRequest(f"{where} has {len(raw)} bytes, not a multiple of {kind.itemsize}", field=where)
    return np.frombuffer(raw, kind)


def render_forward_backward(
    loss: float, outputs: Sequence[learner_pb.DatumOutput], figures: Mapping[str, float]
) -> bytes:
    """The result: one record with the log-probs of all datums."""
    rows = [np.asarray(output.logprobs, "<f4") for output in outputs]
    record = pb.TinkerArrayRecord(type_tag="ArrayRecord", num_datums=len(rows))
    field = record.fields["logprobs"]
    field.data = b"".join(row.tobytes() for row in rows)
    field.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
    field.dtype = pb.TINKER_DTYPE_FLOAT32
    metrics = {"loss:sum": loss, **figures}
    output = pb.TinkerForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return output.SerializeToString(deterministic=True)


def render_samples(samples: Sequence[common_pb2.Sample], prompt: "PromptWish") -> bytes:
    """The result of asample. Raises `ValueError` when the engine left out what was asked for."""
    response = pb.TinkerSampleResponse()
    for sample in samples:
        sequence = response.sequences.add(
            stop_reason=int(sample.finish_reason == "length"),
            tokens=np.asarray(sample.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
        )
        if prompt.top_samples:
            sequence.topk_sampled_logprobs.CopyFrom(
                _top(sample.top_logprobs, prompt.top_samples, len(sample.token_ids))
            )
    scores = next((sample.prompt_scores for sample in samples if sample.prompt_scores), [])
    if prompt.logprobs or prompt.top_prompt:
        if len(scores) != prompt.length - 1:
            raise ValueError("the engine of this base model reports no log-probs of prompts")
        _prompt(response, scores, prompt)
    return response.SerializeToString(deterministic=True)


class PromptWish:
    """What a sample request wants to know beside its tokens."""

    def __init__(self, length: int, *, logprobs: bool, last: int | None, top_prompt: int, top_samples: int) -> None:
        """`length` counts the prompt's tokens; `last` limits the prompt's log-probs to so many of them."""
        self.length, self.logprobs, self.last = length, logprobs, last
        self.top_prompt, self.top_samples = top_prompt, top_samples


def _prompt(response: pb.TinkerSampleResponse, scores: Sequence[common_pb2.TokenScores], wish: PromptWish) -> None:
    first = max(1, wish.length - wish.last) if wish.last else 1
    own = np.full(wish.length, np.nan, "<f4")
    own[first:] = [score.logprobs[0] for score in scores[first - 1 :]]
    if wish.logprobs:
        response.prompt_logprobs = own.tobytes()
    if wish.top_prompt:
        rows = [common_pb2.TokenScores()] * first + list(scores[first - 1 :])
        response.topk_prompt_logprobs.CopyFrom(_top(rows, wish.top_prompt, wish.length))


def _top(rows: Sequence[common_pb2.TokenScores], k: int, length: int) -> pb.TinkerTopkLogprobs:
    """Each row's k likeliest tokens, likeliest first; missing ones are what the SDK takes for none."""
    if len(rows) != length:
        raise ValueError("the engine of this base model reports no alternatives")
    ids, logprobs = np.zeros((length, k), "<i4"), np.full((length, k), _NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        ranked = sorted(zip(row.logprobs, row.token_ids, strict=True), reverse=True)[:k]
        for place, (logprob, token) in enumerate(ranked):
            ids[at, place], logprobs[at, place] = token, logprob
    return pb.TinkerTopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)
