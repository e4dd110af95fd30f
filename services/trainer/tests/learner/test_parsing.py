"""Requests become values or a refusal that names the field."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.errors import InvalidRequest
from reflux_trainer.learner import parsing

from .tiny import CONFIG


def _group() -> pb.PromptGroup:
    completion = pb.Completion(token_ids=[4, 5], behaviour_logprobs=[-1.0, -2.0], advantage=0.5, mask=[1, 0])
    return pb.PromptGroup(prompt_token_ids=[2, 3], completions=[completion])


def test_a_group_keeps_its_numbers() -> None:
    group = parsing.parse_groups([_group()], CONFIG)[0]
    assert group.prompt == [2, 3]
    completion = group.completions[0]
    assert (completion.token_ids, completion.sampler_logprobs) == ([4, 5], [-1.0, -2.0])
    assert (completion.advantage, completion.mask) == (0.5, [True, False])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: g.ClearField("prompt_token_ids"), r"groups\[0\]\.prompt_token_ids must not be empty"),
        (lambda g: g.ClearField("completions"), r"groups\[0\]\.completions must not be empty"),
        (lambda g: g.completions[0].ClearField("token_ids"), r"completions\[0\]\.token_ids must not be empty"),
        (lambda g: g.prompt_token_ids.append(29), "id 29, the vocabulary has 29"),
        (lambda g: g.completions[0].token_ids.extend([2] * 45), "leave 46"),
        (lambda g: g.completions[0].mask.append(1), "mask has 3 entries for 2 tokens"),
        (lambda g: g.completions[0].behaviour_logprobs.append(-1), "behaviour_logprobs has 3 entries"),
    ],
)
def test_a_damaged_group_is_refused_by_name(damage: Callable[[pb.PromptGroup], object], message: str) -> None:
    group = _group()
    damage(group)
    with pytest.raises(InvalidRequest, match=message):
        parsing.parse_groups([group], CONFIG)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one prompt"):
        parsing.parse_groups([], CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "magic"}, "loss.name 'magic'"),
        ({"name": "ppo", "aggregation": "median"}, "loss.aggregation 'median'"),
        ({"name": "ppo", "aggregation": "constant"}, "constant_length"),
        ({"name": "ppo", "aggregation": "sum", "clip_low": 1.5}, "clip_low"),
        ({"name": "ppo", "aggregation": "sum", "tis_cap": float("nan")}, "tis_cap"),
        ({"name": "ppo", "aggregation": "sum", "mis_low": 2.0, "mis_high": 0.5}, "mis_high 0.5 lies below"),
        ({"name": "ppo", "aggregation": "sum", "kl_coefficient": -0.1}, "kl_coefficient"),
        ({"name": "ppo", "aggregation": "sum", "kl_estimator": "k4"}, "'k4' is not one of k1, k2, k3"),
    ],
)
def test_an_impossible_loss_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parsing.parse_loss(pb.LossConfig(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_an_impossible_step_is_refused_by_name(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parsing.parse_step(pb.OptimStepRequest(**fields))  # type: ignore[arg-type]


def test_the_default_epsilon_fills_in() -> None:
    assert parsing.parse_step(pb.OptimStepRequest(learning_rate=1e-3)).eps == 1e-8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "pigeon"}, "transport 'pigeon' is not one of auto, shm, ucx, tcp, nixl"),
        ({"transport": "shm", "weight_dtype": "int8"}, "weight_dtype 'int8'"),
        ({"transport": "shm", "weight_delta": True}, "weight_delta needs weight_dtype 'bfloat16'"),
    ],
)
def test_weights_leave_by_known_transports_and_types_only(fields: dict[str, Any], message: str) -> None:
    for request in (pb.CreateModelRequest(**fields), pb.LoadStateRequest(**fields)):
        with pytest.raises(InvalidRequest, match=message):
            parsing.parse_outlet(request)


def test_differences_are_published_when_they_are_asked_for() -> None:
    request = pb.CreateModelRequest(transport="auto", weight_dtype="bfloat16", weight_delta=True)
    outlet = parsing.parse_outlet(request)
    assert (outlet.transport, outlet.delta) == ("auto", True)
    assert not parsing.parse_outlet(pb.LoadStateRequest(transport="tcp")).delta


def test_the_type_of_passes_is_one_of_two() -> None:
    request = pb.CreateModelRequest(path="m", compute_dtype="bfloat16", gradient_checkpointing=True)
    numerics = parsing.parse_source(request).numerics
    assert (numerics.dtype, numerics.recompute) == (torch.bfloat16, True)
    with pytest.raises(InvalidRequest, match="compute_dtype 'float16' is not one of float32, bfloat16"):
        parsing.parse_source(pb.CreateModelRequest(path="m", compute_dtype="float16"))
