"""Log-probs of given tokens with gradients: the learner's half of the model."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.layers import Attention, additive_mask, attend, embed, rotary_tables, run_layers
from reflux_model.packing import PackedRows, pack_rows
from reflux_model.parameters import Parameters
from reflux_model.projections import PLAIN, Projections
from reflux_model.scoring import TokenScores, chunked_scores


def tree_attention(packed: PackedRows, dtype: torch.dtype) -> Attention:
    """Attention within the trees of packed rows."""
    mask = additive_mask(packed.allowed_RSS[:, None], dtype)

    def tree(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, keys.transpose(1, 2), values.transpose(1, 2), mask)

    return tree


def packed_scores(
    params: Parameters,
    config: ModelConfig,
    packed: PackedRows,
    *,
    temperature: float = 1.0,
    projections: Projections = PLAIN,
    recompute: bool = False,
) -> TokenScores:
    """Scores every predicted token of `packed` under softmax(logits / temperature); `recompute` as in `run_layers`."""
    dtype = params["model.embed_tokens.weight"].dtype
    tree = tree_attention(packed, dtype)
    rope = rotary_tables(config, packed.positions_RS, dtype)
    hidden_RSE = run_layers(
        params, config, embed(params, packed.tokens_RS), rope, tree, projections, recompute=recompute
    )
    sources_TE = hidden_RSE.flatten(0, 1)[packed.sources_T]
    parts, first = [], 0
    for hidden_TE, weight in projections.head(params, sources_TE):
        targets_T = packed.targets_T[first : first + len(hidden_TE)]
        parts.append(chunked_scores(hidden_TE, weight, targets_T, temperature))
        first += len(hidden_TE)
    return replace(parts[0] if len(parts) == 1 else TokenScores.joined(parts), hidden_TE=sources_TE)


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
