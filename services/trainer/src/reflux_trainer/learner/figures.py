"""Running sums over the micro-batches of one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reflux_model.scoring import TokenScores
from reflux_trainer.learner.batching import MicroBatch
from reflux_trainer.learner.ops import BatchFigures


class BatchSums:
    """What one batch adds up to, and the log-probs of its completions in the order of the batch."""

    def __init__(self, completions: int) -> None:
        self._loss = 0.0
        self._tokens = 0.0
        self._entropy = 0.0
        self._gap = 0.0
        self._largest_gap = 0.0
        self._clipped = 0.0
        self._kl, self._referred = 0.0, 0.0
        self._value_loss = 0.0
        self._moments = torch.zeros(5, dtype=torch.float64)
        """Number of values; sums of returns, of their squares, of what the values left over, of its squares."""
        self._logprobs: list[tuple[float, ...]] = [()] * completions

    @torch.no_grad()
    def add(self, part: MicroBatch, scores: TokenScores, sampler_T: Tensor, clipped_T: Tensor, loss: float) -> None:
        """Takes in one micro-batch."""
        mask_T, gap_T = part.mask_T, sampler_T - scores.logprobs_T
        self._loss += loss
        self._tokens += float(mask_T.sum())
        self._entropy += float(scores.entropies_T @ mask_T)
        gap_T = torch.where(mask_T > 0, gap_T, 0.0)
        self._gap += float(gap_T.sum())
        self._largest_gap = max(self._largest_gap, float(gap_T.abs().max()))
        self._clipped += float((clipped_T * mask_T).sum())
        self.keep(part.places, scores.logprobs_T, part.lengths)

    @torch.no_grad()
    def add_reference(self, part: MicroBatch, kl_T: Tensor) -> None:
        """Takes in the KL to the reference of a micro-batch's tokens, where they have one."""
        counted_T = part.mask_T.where(~part.reference_logprobs_T.isnan(), 0.0)
        self._kl += float(kl_T @ counted_T)
        self._referred += float(counted_T.sum())

    @torch.no_grad()
    def add_values(self, part: MicroBatch, losses_T: Tensor) -> None:
        """Takes in the critic's loss, and how well the values at the start of the step told the returns."""
        counted_T = (part.mask_T > 0) & ~part.returns_T.isnan() & ~part.values_T.isnan()
        self._value_loss += float(torch.where(part.mask_T > 0, losses_T * part.weights_T, 0.0).sum())
        returns_T, values_T = part.returns_T[counted_T].double(), part.values_T[counted_T].double()
        rest_T = returns_T - values_T
        self._moments += torch.tensor(
            [len(rest_T), returns_T.sum(), (returns_T**2).sum(), rest_T.sum(), (rest_T**2).sum()], dtype=torch.float64
        )

    def keep(self, places: Sequence[int], logprobs_T: Tensor, lengths: Sequence[int]) -> None:
        """Books the log-probs of completions by their place in the batch."""
        for place, row in zip(places, logprobs_T.detach().split(list(lengths)), strict=True):
            self._logprobs[place] = tuple(row.tolist())

    def merge(self, other: "BatchSums") -> None:
        """Takes in what another rank saw of the same batch."""
        self._loss += other._loss
        self._tokens += other._tokens
        self._entropy += other._entropy
        self._gap += other._gap
        self._largest_gap = max(self._largest_gap, other._largest_gap)
        self._clipped += other._clipped
        self._kl += other._kl
        self._referred += other._referred
        self._logprobs = [own or seen for own, seen in zip(self._logprobs, other._logprobs, strict=True)]

    def figures(self, seconds: float, *, outputs: bool) -> BatchFigures:
        """Means over the tokens that count, with the log-probs if `outputs`."""
        tokens = max(1.0, self._tokens)
        return BatchFigures(
            loss=self._loss,
            tokens=int(self._tokens),
            entropy=self._entropy / tokens,
            kl_sample_train=self._gap / tokens,
            max_logprob_gap=self._largest_gap,
            clip_fraction=self._clipped / tokens,
            seconds=seconds,
            value_loss=self._value_loss,
            explained_variance=explained_variance(*self._moments.tolist()),
            kl_reference=self._kl / max(1.0, self._referred),
            logprobs=tuple(self._logprobs) if outputs else (),
        )


def explained_variance(count: float, returns: float, squares: float, rests: float, rest_squares: float) -> float:
    """1 - Var(rest) / Var(return) from sums; 0 for returns that do not vary."""
    if count < 2:
        return 0.0
    spread, left = squares / count - (returns / count) ** 2, rest_squares / count - (rests / count) ** 2
    return 1.0 - left / spread if spread > 1e-12 else 0.0
