"""What the model says of a prompt's own tokens, from the hidden states that a prefill leaves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reflux_inference_gateway.engine.types import PromptScores, TokenScore
from reflux_model.layers import project_to_vocab
from reflux_model.parameters import Parameters
from reflux_model.projections import Projections

_POSITIONS = 128
"""Positions whose logits are held at the same time."""


def score_tokens(
    params: Parameters, projections: Projections, hidden_TE: Tensor, tokens: Sequence[int], count: int
) -> PromptScores:
    """Scores `tokens[t]` under the distribution at `hidden_TE[t]`, and the `count` likeliest ones beside it.

    Log-probs are natural, at temperature 1. The token itself comes first, then the likeliest, best first.
    """
    scores: PromptScores = []
    for start in range(0, len(tokens), _POSITIONS):
        part = tokens[start : start + _POSITIONS]
        logits_TV = project_to_vocab(params, hidden_TE[start : start + len(part)], projections)
        logprobs_TV = torch.log_softmax(logits_TV.float(), -1)
        own_T1 = logprobs_TV.gather(-1, torch.tensor(part)[:, None])
        ranks = ((logprobs_TV > own_T1).sum(-1) + 1).tolist()
        best = logprobs_TV.topk(min(count, logprobs_TV.shape[1]), -1)
        rows = zip(part, own_T1[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
        for token, own, rank, ids, values in rows:
            ranked = {one: TokenScore(value, at + 1) for at, (one, value) in enumerate(zip(ids, values, strict=True))}
            scores.append({token: TokenScore(own, rank)} | ranked)
    return scores
