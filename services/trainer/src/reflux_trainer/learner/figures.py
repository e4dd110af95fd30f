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
            kl_reference=self._kl / max(1.0, self._referred),
            logprobs=tuple(self._logprobs) if outputs else (),
        )
