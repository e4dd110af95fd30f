"""What work costs a replica: the model by which routing compares plans. All in units of one prefilled token's time."""

from dataclasses import dataclass
from typing import NamedTuple

_UNKNOWN_CAPACITY = 64
"""Sequences at once of a replica that did not say."""


@dataclass(frozen=True)
class CostModel:
    """Prefill p seconds per token; a decode step of b sequences t(b) = t0 + t1 b seconds, t(b) / b per token.

    Plans are compared with each other only, so p is the unit. t1 / p = 1: a decoded token computes what a prefilled
    one computes. t0 / p is the machine's balance of floating-point operations to bytes, since a step reads 2 bytes for
    the 2 operations per parameter of one token (roofline: Williams, Waterman, Patterson 2009): 295 for an H100 by its
    data sheet, 156 for an A100, half of it at the usual efficiency of prefill, 10 to 30 for a CPU. The default lies
    in between; ADR-0014 says how little the choice depends on it.
    """

    prefill_per_token: float = 1.0
    decode_step: float = 100.0
    decode_step_per_sequence: float = 1.0

    def decode_per_token(self, capacity: int) -> float:
        """t(C) / C: time per token of a replica that decodes as many sequences as it can."""
        return self.decode_step / (capacity or _UNKNOWN_CAPACITY) + self.decode_step_per_sequence


class Outlook(NamedTuple):
    """A replica's work as the model sees it, and what a share of one group would add to it.

    A named tuple because one is made per replica and request: a frozen dataclass takes three times as long.
    """

    costs: CostModel
    capacity: int
    """Sequences at once; 0 when unknown."""
    prefill_tokens: float
    """What it has to prefill for the group."""
    backlog_tokens: float
    """Tokens that requests in flight are expected to generate."""
    sequences: float
    """Samples in flight."""
    mean: float
    """Expected tokens of one sample of the group."""
    longest: float
    """Expected tokens of its longest sample."""

    @property
    def prefill(self) -> float:
        """Time of the prefill."""
        return self.costs.prefill_per_token * self.prefill_tokens

    def finish(self, num_samples: int) -> float:
        """Time until the last of `num_samples` samples is expected to be done; 0 for no sample.

        Steps cost t0 each and tokens t1 each, so finish(k) = p prefill + t0 S + t1 W with the tokens
        W = backlog + k mean and S steps: S = longest while all fit into a batch, S <= W / C + (1 - 1 / C) longest
        otherwise (list scheduling: Graham 1969). It never falls with k.
        """
        if num_samples == 0:
            return 0.0
        capacity = self.capacity or _UNKNOWN_CAPACITY
        tokens = self.backlog_tokens + num_samples * self.mean
        steps = self.longest
        if self.sequences + num_samples > capacity:
            steps = max(steps, tokens / capacity + (1 - 1 / capacity) * self.longest)
        return self.prefill + self.costs.decode_step * steps + self.costs.decode_step_per_sequence * tokens
