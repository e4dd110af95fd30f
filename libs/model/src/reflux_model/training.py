"""Log-probs of given tokens with gradients: the learner's half of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.layers import additive_mask, attend, embed, project_to_vocab, rotary_tables, run_layers
from reflux_model.packing import PackedRows, pack_rows
from reflux_model.parameters import Parameters


@dataclass(frozen=True)
class TokenScores:
    """Per predicted token (T): log-prob, with gradient if the parameters have one, and entropy of its distribution."""

    logprobs_T: Tensor
    entropies_T: Tensor
    """In nats, without gradient."""


def packed_scores(
    params: Parameters, config: ModelConfig, packed: PackedRows, *, temperature: float = 1.0
) -> TokenScores:
    """Scores every predicted token of `packed` under softmax(logits / temperature)."""
    dtype = params["model.embed_tokens.weight"].dtype
    mask = additive_mask(packed.allowed_RSS[:, None], dtype)

    def tree(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, keys.transpose(1, 2), values.transpose(1, 2), mask)

    rope = rotary_tables(config, packed.positions_RS, dtype)
    hidden_RSE = run_layers(params, config, embed(params, packed.tokens_RS), rope, tree)
    logits_TV = project_to_vocab(params, hidden_RSE.flatten(0, 1)[packed.sources_T]).float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    logprobs_TV = torch.log_softmax(logits_TV, -1)
    detached = logprobs_TV.detach()
    entropies_T = -(detached.exp() * detached).sum(-1)
    return TokenScores(logprobs_TV.gather(-1, packed.targets_T[:, None])[:, 0], entropies_T)


def logprobs(
    params: Parameters,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Log-probs of each completion's tokens, in order (all completions of prompt 0 first).

    `completions[p]` are the samples of `prompts[p]`; the prompt is computed once for all of them, with gradient.
    """
    scores = packed_scores(params, config, pack_rows(prompts, completions), temperature=temperature)
    lengths = [len(completion) for group in completions for completion in group]
    return list(scores.logprobs_T.split(lengths))
