"""The functional forward against the Hugging Face classes, and its paths against each other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from reflux_model.cache import SlotCache
from reflux_model.config import Architecture, ModelConfig, RopeScaling
from reflux_model.folder import load_folder, save_folder
from reflux_model.inference import decode_step, prefill
from reflux_model.parameters import initial_parameters
from reflux_model.presets import TINY
from reflux_model.training import logprobs

torch.set_num_threads(1)

BASE = replace(TINY, vocab_size=61, max_positions=64)


def _variant(architecture: Architecture = "LlamaForCausalLM", **changes: object) -> ModelConfig:
    return ModelConfig(**{**BASE.__dict__, "architecture": architecture, **changes})


VARIANTS = {
    "llama, tied, grouped queries": BASE,
    "llama, head of its own": _variant(tie_embeddings=False, num_kv_heads=4),
    "llama with biases": _variant(attention_bias=True, output_bias=True),
    "llama 3 rope": _variant(
        rope_theta=500.0, rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_max_positions=32)
    ),
    "linear rope": _variant(rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "qwen 2": _variant("Qwen2ForCausalLM", attention_bias=True),
    "qwen 3, wide heads": _variant("Qwen3ForCausalLM", query_key_norm=True, head_size=16),
}


def _params(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    params = initial_parameters(config, seed=3, std=0.2)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if tensor.dim() == 1 else tensor
        for name, tensor in params.items()
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    save_folder(tmp_path, config, _params(config))
    loaded, params = load_folder(tmp_path)
    assert loaded == config
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt, completion = list(range(3, 20)), [5, 9, 33, 60, 2, 1]
    ours = logprobs(params, config, [prompt], [[completion]])[0]
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + completion])).logits[0].float().log_softmax(-1)
    theirs = logits[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    save_folder(tmp_path, BASE, _params(BASE))
    _, params = load_folder(tmp_path)
    leaves = {name: tensor.requires_grad_() for name, tensor in params.items()}
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompts = [[3, 4, 5, 6, 7], [8, 9, 10]]
    completions = [[[11, 12, 1], [13, 1]], [[14, 15, 16, 1], [17]]]
    sum(part.sum() for part in logprobs(leaves, BASE, prompts, completions)).backward()
    total = torch.zeros(())
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            scores = oracle(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
            total = total + scores[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None]).sum()
    total.backward()
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(leaves[name].grad, parameter.grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_step_by_step_agrees_with_the_training_path(name: str) -> None:
    config = VARIANTS[name]
    params = _params(config)
    prompts = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
    completions = [[20, 21, 22, 1], [30, 31, 32, 33], [40, 41, 42, 43]]
    expected = logprobs(params, config, prompts, [[completion] for completion in completions])
    cache = SlotCache(config, num_slots=4, max_length=16)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.tensor([prompt + [0] * (5 - len(prompt)) for prompt in prompts])
    prefilled = prefill(params, config, padded, lengths)
    slots = torch.tensor([2, 0, 3])
    cache.insert(prefilled.kv, torch.arange(3), slots)
    logits = prefilled.logits_BV
    for step in range(4):
        tokens = torch.tensor([completion[step] for completion in completions])
        got = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(got, torch.stack([row[step] for row in expected]), atol=1e-5, rtol=0)
        logits = decode_step(params, config, tokens, cache, lengths + step, slots)
