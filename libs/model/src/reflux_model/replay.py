"""Log-probs of a sample computed as an engine computed them that decodes one sequence at a time: equal to the last bit.

The result of a matrix product depends on the shape of all of it, so that the same token beside other tokens has other
last bits. Here every call has the shapes of that engine's calls: the prompt but its last token in chunks, then one
token per step, each attending to its own sequence only. Nothing depends on what else is in a batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import Segment, decode_step, extend
from reflux_model.parameters import Parameters
from reflux_model.sampling import plain_distribution

PREFILL_TOKENS = 512
"""Prompt tokens per call; the engine's `prefill_tokens_per_step` has to be the same."""


@torch.inference_mode()
def replayed_logprobs(
    params: Parameters,
    config: ModelConfig,
    prompt: Sequence[int],
    completion: Sequence[int],
    fed: Sequence[int] = (),
) -> Tensor:
    """Log-prob of every token of the completion under softmax(logits); `prompt` has at least one token.

    `fed` are the tokens that are read behind the prompt where these are not the completion's own but the last.
    """
    cache = SlotCache(config, 1, len(prompt) + len(completion), dtype=params["model.embed_tokens.weight"].dtype)
    for start in range(0, len(prompt) - 1, PREFILL_TOKENS):
        end = min(start + PREFILL_TOKENS, len(prompt) - 1)
        extend(params, config, [Segment(0, start, prompt[start:end])], cache)
    scores: list[Tensor] = []
    reads = (prompt[-1], *(fed or completion[:-1]))
    for index, (last, token) in enumerate(zip(reads, completion, strict=True)):
        position = torch.tensor([len(prompt) - 1 + index])
        logits_1V = decode_step(params, config, torch.tensor([last]), cache, position).float()
        _, _, normalizers_1 = plain_distribution(logits_1V)
        scores.append(logits_1V.gather(-1, torch.tensor([[token]]))[:, 0] - normalizers_1)
    return torch.cat(scores).clone()
