"""Log-probs and entropies from hidden states, a few rows of logits at a time.

The logits of T tokens over V entries are never there at once: a chunk of rows is multiplied out, reduced, and dropped.
The backward pass multiplies it out again, so that peak memory depends on neither T nor T * V. Only as many logits as
`KEPT_LOGITS` are kept for the backward pass, a constant: small batches then pay nothing for the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 23
"""Logits of one chunk: 32 MiB in float32, above which CPUs slow down and below which calls cost more than they do."""
KEPT_LOGITS = 1 << 24
"""Logits that the backward pass finds again without multiplying: 64 MiB."""


@dataclass(frozen=True)
class TokenScores:
    """Per predicted token (T): log-prob, with gradient if the parameters have one, and entropy of its distribution."""

    logprobs_T: Tensor
    entropies_T: Tensor
    """In nats, without gradient."""
    hidden_TE: Tensor | None = None
    """Last hidden state that each token was predicted from, with gradient; `packed_scores` has it."""

    @classmethod
    def joined(cls, parts: "Sequence[TokenScores]") -> "TokenScores":
        """Scores of neighbouring parts as one."""
        return cls(torch.cat([part.logprobs_T for part in parts]), torch.cat([part.entropies_T for part in parts]))


def chunked_scores(hidden_TE: Tensor, weight_VE: Tensor, targets_T: Tensor, temperature: float = 1.0) -> TokenScores:
    """Scores of `targets_T` under softmax(hidden @ weight.T / temperature); reductions are float32."""
    if temperature != 1.0:
        hidden_TE = hidden_TE / temperature
    return TokenScores(*_Scores.apply(hidden_TE, weight_VE, targets_T))


class _Scores(torch.autograd.Function):
    """lp_t = z_t[y_t] - log sum exp z_t with z = H W^T; d lp_t / d z_t = onehot(y_t) - softmax(z_t)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        logprobs = torch.empty(tokens, device=hidden.device)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept: list[Tensor] = []
        keeps = KEPT_LOGITS if any(ctx.needs_input_grad[:2]) else 0
        for rows in _chunks(tokens, vocabulary):
            logits = torch.mm(hidden[rows], weight.t()).float()
            top = logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, targets[rows, None])
            masses = (logits - top).exp_()
            total = masses.sum(-1, keepdim=True)
            normaliser = top + total.log()
            logprobs[rows] = (chosen - normaliser)[:, 0]
            # H = log Z - E[z]; the product is taken row by row, so that no third array of logits appears.
            mean = torch.linalg.vecdot(masses, logits)[:, None] / total
            entropies[rows], normalisers[rows] = (normaliser - mean)[:, 0], normaliser[:, 0]
            if keeps >= masses.numel():
                kept.append(masses.div_(total))
                keeps -= masses.numel()
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.kept = kept
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        above = gradients[0][:, None]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros(weight.shape, device=weight.device) if wants_weight else None
        for index, rows in enumerate(_chunks(hidden.shape[0], weight.shape[0])):
            if index < len(ctx.kept):
                masses = ctx.kept[index]
            else:
                masses = torch.mm(hidden[rows], weight.t()).float().sub_(normalisers[rows, None]).exp_()
            slopes = torch.mul(masses, -above[rows], out=masses)
            slopes.scatter_add_(1, targets[rows, None], above[rows])
            slopes = slopes.to(weight.dtype)
            if to_hidden is not None:
                torch.mm(slopes, weight, out=to_hidden[rows])
            if to_weight is not None:
                _add_product(to_weight, slopes.t(), hidden[rows])
        ctx.kept = []
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; what is narrower than float32 is summed over chunks in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]
