"""The learner's recomputed log-probs are those of the torch engine, to the last bit, when both compute row by row."""

import pytest
import torch

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, Sampling, TokenDelta
from reflux_model.config import ModelConfig
from reflux_model.parameters import initial_parameters
from reflux_model.replay import PREFILL_TOKENS
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.numerics import Numerics
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec

torch.set_num_threads(1)
SHAPES = {
    "tiny": ModelConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        max_positions=96,
    ),
    "odd sizes": ModelConfig(
        vocab_size=333,
        hidden_size=66,
        intermediate_size=131,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_size=22,
        max_positions=96,
    ),
}


def sampled(config: ModelConfig, weights: Weights) -> list[GroupData]:
    """Groups as an engine of one row answers them."""
    finished: dict[str, dict[int, FinishedSample]] = {}

    def deliver(request_id: str, event: FinishedSample | TokenDelta) -> None:
        if isinstance(event, FinishedSample):
            finished.setdefault(request_id, {})[event.index] = event

    options = CoreOptions(
        max_rows=1,
        max_model_len=96,
        kv_tokens=96,
        prefill_tokens_per_step=PREFILL_TOKENS,
        prefix_blocks=0,
        kv_after_swap="refresh",
    )
    core = EngineCore(config, weights, options, deliver, eos_ids=[1])
    prompts = [[3 + (7 * number + place) % 20 for place in range(1 + 6 * number)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=14, seed=number)
        core.submit(GroupRequest(request_id=f"{number}", prompt_ids=tuple(prompt), num_samples=3, sampling=sampling))
    while core.step():
        pass
    return [
        GroupData(
            prompt,
            [
                CompletionData(list(each.token_ids), list(each.logprobs), advantage=1.0 - index)
                for index, each in sorted(finished[f"{number}"].items())
            ],
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_recomputed_log_probs_have_the_bits_of_the_engine(name: str) -> None:
    config = SHAPES[name]
    params = initial_parameters(config, 0, std=0.3)
    learner = Learner(config, params, 0, Numerics(deterministic=True))
    for version in range(3):
        weights = {each: tensor.detach().clone() for each, tensor in learner.params.items()}
        groups = sampled(config, Weights(weights, version, 10 + version))
        told = [list(completion.sampler_logprobs) for group in groups for completion in group.completions]
        assert [row for group in learner.score(groups) for row in group] == told
        figures = learner.forward_backward(groups, LossSpec(name="ppo"))
        assert (figures.max_logprob_gap, figures.kl_sample_train, figures.clip_fraction) == (0.0, 0.0, 0.0)
        assert learner.optim_step(StepSpec(learning_rate=1e-2)).applied


def test_gradients_are_those_of_packed_rows() -> None:
    config = SHAPES["tiny"]
    params = initial_parameters(config, 0, std=0.3)
    groups = sampled(config, Weights(params, 0, 1))
    exact, plain = Learner(config, params, 0, Numerics(deterministic=True)), Learner(config, params, 0)
    figures = [learner.forward_backward(groups, LossSpec(name="ppo")) for learner in (exact, plain)]
    torch.testing.assert_close(exact.gradient, plain.gradient, atol=1e-6, rtol=1e-4)
    assert 0 < figures[1].max_logprob_gap < 1e-4
