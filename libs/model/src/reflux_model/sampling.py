"""Choice of the next token: greedy, temperature, top-k, top-p; each request has its own random stream.

The random number of a token depends on (seed of the request, position of the token) only, so a request gives the same
tokens whatever else is in the batch, on whichever replica, and after a restart, as long as the logits agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class Sampled:
    """Chosen tokens and their log-probs.

    `logprobs_B` (float32) is the log-softmax of the plain logits, before temperature, top-k and top-p: the value that a
    learner recomputes from tokens and weights.
    """

    tokens_B: Tensor
    logprobs_B: Tensor


@dataclass(frozen=True)
class SamplingParams:
    """One row per request; all tensors have shape (B,).

    `temperature_B` float32, 0 = greedy; `top_k_B` int64, 0 = off; `top_p_B` float32 in (0, 1], 1 = off; `seeds_B` int64
    (one per row, so sample i of a group needs a seed of its own).
    """

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seeds_B: Tensor

    @staticmethod
    def uniform(
        seeds: list[int] | Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> "SamplingParams":
        """The same settings for every row, with the given seeds (any 64-bit integers)."""
        seeds_B = seeds_tensor(seeds) if isinstance(seeds, list) else seeds
        rows = seeds_B.shape[0]
        return SamplingParams(
            torch.full((rows,), temperature),
            torch.full((rows,), top_k, dtype=torch.int64),
            torch.full((rows,), top_p),
            seeds_B,
        )

    def rows(self, index: Tensor) -> "SamplingParams":
        """The settings of the chosen rows."""
        return SamplingParams(self.temperature_B[index], self.top_k_B[index], self.top_p_B[index], self.seeds_B[index])


def seeds_tensor(seeds: list[int]) -> Tensor:
    """Unsigned or signed 64-bit seeds as an int64 tensor (values from 2^63 on wrap)."""
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds], dtype=torch.int64)


@torch.inference_mode()
def sample(logits_BV: Tensor, params: SamplingParams, positions_B: Tensor) -> Sampled:
    """Draws one token per row. `positions_B` (int64) is the index that the drawn token will have in its sequence.

    Draws by inverting the cumulative distribution in vocabulary order, in float64, with one uniform number per row. Of
    equal logits at the edge of a top-k set the lower ids stay.
    """
    logits = logits_BV.float()
    greedy_B = params.temperature_B <= 0
    probs_BV = torch.softmax((logits / torch.where(greedy_B, 1.0, params.temperature_B)[:, None]).double(), -1)
    cut_B = ((params.top_k_B > 0) & (params.top_k_B < logits.shape[1])) | (params.top_p_B < 1)
    if bool(cut_B.any()):
        kept = _nucleus(probs_BV[cut_B], params.top_k_B[cut_B], params.top_p_B[cut_B])
        probs_BV[cut_B] = probs_BV[cut_B].masked_fill(~kept, 0.0)
    cumulative_BV = probs_BV.cumsum(-1)
    threshold_B1 = (uniform_numbers(params.seeds_B, positions_B) * cumulative_BV[:, -1])[:, None]
    drawn_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    tokens_B = torch.where(greedy_B, logits.argmax(-1), drawn_B)
    chosen_B = logits.gather(-1, tokens_B[:, None])[:, 0]
    return Sampled(tokens_B, chosen_B - logits.logsumexp(-1))


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


def _nucleus(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """True for tokens that stay: the top k, and the smallest head of the distribution whose mass reaches top-p."""
    ordered, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs_BV.shape[1], device=probs_BV.device)[None]
    within_k = (top_k_B[:, None] <= 0) | (ranks < top_k_B[:, None])
    mass_before = torch.where(within_k, ordered, 0.0).cumsum(-1) - ordered
    total = torch.where(within_k, ordered, 0.0).sum(-1, keepdim=True)
    stays = within_k & ((mass_before < top_p_B[:, None].double() * total) | (ranks == 0))
    return torch.zeros_like(stays).scatter_(-1, order, stays)
