"""Choice of the next token: greedy, temperature, min-p, top-k, top-p; each request has its own random stream.

The random number of a token depends on (seed of the request, position of the token) only, so a request gives the same
tokens whatever else is in the batch, on whichever replica, and after a restart, as long as the logits agree.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_BLOCK = 256
"""Tokens whose weights are summed first when a token is drawn: a cumulative sum over all of them is the slow way."""

_COLDEST = 1e-5
"""Temperatures below it are greedy: logits divided by less leave the range of float32."""


@dataclass(frozen=True)
class Sampled:
    """Chosen tokens and their log-probs.

    `logprobs_B` (float32) is the log-softmax of the plain logits, before temperature, min-p, top-k and top-p: the value
    that a learner recomputes from tokens and weights.
    """

    tokens_B: Tensor
    logprobs_B: Tensor


@dataclass(frozen=True)
class SamplingParams:
    """One row per request; all tensors have shape (B,).

    `temperature_B` float32, 0 = greedy; `top_k_B` int64, 0 = off; `top_p_B` float32 in (0, 1], 1 = off; `min_p_B`
    float32 in [0, 1], 0 = off: tokens below that share of the likeliest one's probability are left out; `seeds_B` int64
    (one per row, so sample i of a group needs a seed of its own).
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seeds_B: Tensor

    @staticmethod
    def uniform(
        seeds: list[int] | Tensor,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> "SamplingParams":
        """The same settings for every row, with the given seeds (any 64-bit integers)."""
        seeds_B = seeds_tensor(seeds) if isinstance(seeds, list) else seeds
        rows = seeds_B.shape[0]
        return SamplingParams(
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int64),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            seeds_B,
        )

    def rows(self, index: Tensor) -> "SamplingParams":
        """The settings of the chosen rows."""
        return SamplingParams(
            self.temperature_B[index],
            self.top_k_B[index],
            self.top_p_B[index],
            self.min_p_B[index],
            self.seeds_B[index],
        )


def seeds_tensor(seeds: list[int]) -> Tensor:
    """Unsigned or signed 64-bit seeds as an int64 tensor (values from 2^63 on wrap)."""
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds], dtype=torch.int64)


@torch.inference_mode()
def sample(logits_BV: Tensor, params: SamplingParams, positions_B: Tensor) -> Sampled:
    """Draws one token per row. `positions_B` (int64) is the index that the drawn token will have in its sequence.

    Draws by inverting the cumulative distribution in vocabulary order with one uniform number per row. Temperature
    comes first, then min-p, then top-k, then top-p on what is left. Of equal logits at the edge of a top-k set the
    lower ids stay.
    """
    logits = logits_BV.float()
    greedy_B = params.temperature_B < _COLDEST
    best_B1, weights_BV, normalizers_B = plain_distribution(logits)
    if bool(((params.temperature_B != 1) & ~greedy_B).any()):
        weights_BV = torch.sub(logits, best_B1, out=weights_BV)
        weights_BV = weights_BV.div_(torch.where(greedy_B, 1.0, params.temperature_B)[:, None]).exp_()
    cut_B = ((params.top_k_B > 0) & (params.top_k_B < logits.shape[1])) | (params.top_p_B < 1) | (params.min_p_B > 0)
    if bool(cut_B.any()):
        kept = _nucleus(weights_BV[cut_B], params.rows(cut_B))
        weights_BV[cut_B] = weights_BV[cut_B].masked_fill(~kept, 0.0)
    drawn_B = _invert(weights_BV, uniform_numbers(params.seeds_B, positions_B))
    tokens_B = torch.where(greedy_B, logits.argmax(-1), drawn_B) if bool(greedy_B.any()) else drawn_B
    chosen_B = logits.gather(-1, tokens_B[:, None])[:, 0]
    return Sampled(tokens_B, chosen_B - normalizers_B)


def plain_distribution(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of float32 logits: the best (B, 1), exp(logits - best) and log sum exp(logits) per row."""
    best_B1 = logits_BV.amax(-1, keepdim=True)
    weights_BV = (logits_BV - best_B1).exp_()
    return best_B1, weights_BV, (best_B1 + weights_BV.sum(-1, keepdim=True).log())[:, 0]


@torch.inference_mode()
def top_logprobs(logits_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens of each row: (token ids, plain log-probs), each (B, count), best first."""
    best = torch.log_softmax(logits_BV.float(), -1).topk(min(count, logits_BV.shape[1]), -1)
    return best.indices, best.values


def uniform_numbers(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Uniform float64 in [0, 1) from each (seed, position): two rounds of the splitmix64 finaliser."""
    mixed = _mix(_mix(seeds_B + _GOLDEN) + (positions_B + 1) * _GOLDEN)
    return ((mixed >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(value: Tensor) -> Tensor:
    value = (value ^ ((value >> 30) & (2**34 - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & (2**37 - 1))) * _MIX_2
    return value ^ ((value >> 31) & (2**33 - 1))


def _nucleus(weights_BV: Tensor, params: SamplingParams) -> Tensor:
    """True for tokens that stay: near enough to the best, of the top k, in the smallest head that reaches top-p."""
    ordered, order = weights_BV.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights_BV.shape[1], device=weights_BV.device)[None]
    top_k_B1 = params.top_k_B[:, None]
    within = (top_k_B1 <= 0) | (ranks < top_k_B1)
    within &= ordered >= params.min_p_B[:, None].double() * ordered[:, :1]
    mass = torch.where(within, ordered, 0.0)
    mass_before = mass.cumsum(-1) - mass
    total = mass.sum(-1, keepdim=True)
    stays = within & ((mass_before < params.top_p_B[:, None].double() * total) | (ranks == 0))
    return torch.zeros_like(stays).scatter_(-1, order, stays)


def _invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Index of the token at which the running sum of weights passes `uniform_B` (float64 in [0, 1)) of the total."""
    rows, width = weights_BV.shape
    padded = F.pad(weights_BV, (0, -width % _BLOCK)) if width % _BLOCK else weights_BV
    blocks_BCK = padded.view(rows, -1, _BLOCK)
    sums_BC = blocks_BCK.sum(-1).double().cumsum(-1)
    wanted_B1 = _below(uniform_B[:, None] * sums_BC[:, -1:], sums_BC[:, -1:])
    block_B1 = torch.searchsorted(sums_BC, wanted_B1, right=True).clamp_max(sums_BC.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, sums_BC.gather(-1, (block_B1 - 1).clamp_min(0)), 0.0)
    inner_BK = blocks_BCK[torch.arange(rows, device=padded.device), block_B1[:, 0]].double().cumsum(-1)
    offset_B1 = torch.searchsorted(inner_BK, _below(wanted_B1 - before_B1, inner_BK[:, -1:]), right=True)
    return (block_B1 * _BLOCK + offset_B1)[:, 0].clamp_max(width - 1)


def _below(wanted: Tensor, total: Tensor) -> Tensor:
    """`wanted`, less than `total` in spite of rounding: a token of weight 0 behind the last one is never taken."""
    return torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
