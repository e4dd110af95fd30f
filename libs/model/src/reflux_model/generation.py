"""Sampling of whole groups in one batch: each prompt is prefilled once, rows leave the batch as they finish."""

from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import decode_step, prefill
from reflux_model.parameters import Parameters
from reflux_model.sampling import SamplingParams, sample


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (the end token included when there is one) and the log-prob of each."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    """False when `max_new_tokens` cut it."""


@torch.inference_mode()
def generate(
    params: Parameters,
    config: ModelConfig,
    prompts: list[list[int]],
    sampling: SamplingParams,
    *,
    group_size: int = 1,
    max_new_tokens: int,
    end_token: int,
) -> list[Completion]:
    """Samples `group_size` completions per prompt; row p * group_size + g uses row p * group_size + g of `sampling`."""
    lengths_P = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths_P.max())
    tokens_PL = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    prefilled = prefill(params, config, tokens_PL, lengths_P)
    owner = torch.arange(len(prompts)).repeat_interleave(group_size)
    row_ids = torch.arange(owner.shape[0])
    cache = SlotCache(config, owner.shape[0], width + max_new_tokens, dtype=prefilled.kv.keys.dtype)
    cache.insert(prefilled.kv, owner, row_ids)
    tokens = torch.full((owner.shape[0], max_new_tokens), -1)
    logprobs = torch.zeros(owner.shape[0], max_new_tokens)
    logits, positions, active = prefilled.logits_BV[owner], lengths_P[owner], row_ids
    for step in range(max_new_tokens):
        drawn = sample(logits, sampling.rows(active), positions)
        tokens[active, step], logprobs[active, step] = drawn.tokens_B, drawn.logprobs_B
        order = _refilled(drawn.tokens_B != end_token, cache)
        if order.shape[0] == 0 or step == max_new_tokens - 1:
            break
        active, positions = active[order], positions[order]
        logits = decode_step(params, config, drawn.tokens_B[order], cache, positions)
        positions = positions + 1
    return [_completion(row, scores, end_token) for row, scores in zip(tokens.tolist(), logprobs.tolist(), strict=True)]


def _refilled(alive_B: Tensor, cache: SlotCache) -> Tensor:
    """Closes the gaps that finished rows leave with rows from the end; returns the old row of each remaining slot."""
    kept = int(alive_B.sum())
    order = torch.arange(kept)
    gaps = (~alive_B[:kept]).nonzero()[:, 0]
    if gaps.shape[0]:
        fillers = alive_B[kept:].nonzero()[:, 0] + kept
        cache.move(fillers, gaps)
        order[gaps] = fillers
    return order


def _completion(row: list[int], scores: list[float], end_token: int) -> Completion:
    length = row.index(end_token) + 1 if end_token in row else row.index(-1) if -1 in row else len(row)
    return Completion(row[:length], scores[:length], end_token in row)
