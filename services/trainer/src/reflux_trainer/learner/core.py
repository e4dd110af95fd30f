"""The learner's arithmetic: one model, its gradient, its AdamW moments, all in flat buffers. Single-threaded."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.folder import load_folder
from reflux_model.parameters import Parameters
from reflux_model.training import packed_scores
from reflux_trainer.learner.adamw import FlatAdamW
from reflux_trainer.learner.batching import MicroBatch, micro_batches, pack_groups, parts_for_scoring
from reflux_trainer.learner.losses import token_losses
from reflux_trainer.learner.ops import BatchFigures, GroupData, LossSpec, StepFigures, StepSpec
from reflux_transfer.memory import private

_ALIGNMENT = 64
"""Elements; each parameter starts on a 256-byte boundary of the flat buffers."""
DEFAULT_MICRO_BATCH = 128
"""Completions per micro-batch when the caller does not choose; small parts have less padding."""


class Learner:
    """Model and optimizer of one run.

    Gradients of several `forward_backward` calls add up until `optim_step` applies and clears them. Each call is
    normalised by its own batch. A loss or gradient that is not finite poisons the step: it is refused, counted in
    `refused_steps`, and the gradient is dropped. Not thread-safe: one thread owns it.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], seed: int) -> None:
        self.config = config
        self.version = 0
        self.refused_steps = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.offsets = _offsets(params)
        size = sum(-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in params.values())
        self.flat = _in_huge_pages(size)
        self.gradient = torch.zeros(size)
        self._shapes = {name: tensor.shape for name, tensor in params.items()}
        self._leaves = {name: view.requires_grad_() for name, view in self.views(self.flat).items()}
        for name, gradient in self.views(self.gradient).items():
            self._leaves[name].grad = gradient
            self._leaves[name].data.copy_(params[name])
        self.optimizer = FlatAdamW()
        self.accumulated = False
        self.poisoned = False

    @classmethod
    def from_folder(cls, folder: Path, seed: int) -> "Learner":
        """Loads a Hugging Face folder; errors as in `reflux_model.folder.load_folder`."""
        config, params = load_folder(folder)
        return cls(config, params, seed)

    @property
    def params(self) -> Parameters:
        """The weights by Hugging Face name; views that every step changes."""
        return self._leaves

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views into a flat buffer that is laid out as the parameters."""
        return {
            name: flat[start : start + math.prod(self._shapes[name])].view(self._shapes[name])
            for name, start in self.offsets.items()
        }

    def forward_backward(self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int = 0) -> BatchFigures:
        """Adds the gradient of one batch; `micro_batch` counts completions, 0 takes the default."""
        started = time.perf_counter()
        sums = _Sums()
        poisoned, self.poisoned = self.poisoned, True  # what an exception leaves behind is half a gradient
        self.accumulated = True
        for part in micro_batches(groups, loss, micro_batch or DEFAULT_MICRO_BATCH, self.config.vocab_size):
            poisoned |= not math.isfinite(self._backward(part, loss, sums))
        self.poisoned = poisoned
        return sums.figures(time.perf_counter() - started)

    def optim_step(self, step: StepSpec) -> StepFigures:
        """Applies the gradient, unless it is not finite, and clears it. A step without any gradient is one of zeros."""
        started = time.perf_counter()
        norm = float(self.gradient.norm())
        applied = math.isfinite(norm) and not self.poisoned
        if applied:
            self._apply(step, norm)
            self.version += 1
        else:
            self.refused_steps += 1
        self.gradient.zero_()
        self.accumulated, self.poisoned = False, False
        return StepFigures(norm, self.version, applied, time.perf_counter() - started)

    @torch.no_grad()
    def score(self, groups: Sequence[GroupData], micro_batch: int = 0) -> list[list[list[float]]]:
        """Log-probs of every completion's tokens under the present weights: [group][completion][token]."""
        rows: list[list[float]] = []
        for part in parts_for_scoring(groups, micro_batch or DEFAULT_MICRO_BATCH, self.config.vocab_size):
            scores = packed_scores(self.params, self.config, pack_groups(part)).logprobs_T
            lengths = [len(completion.token_ids) for group in part for completion in group.completions]
            rows += [piece.tolist() for piece in scores.split(lengths)]
        entries = iter(rows)
        return [[next(entries) for _ in group.completions] for group in groups]

    def _backward(self, part: MicroBatch, loss: LossSpec, sums: "_Sums") -> float:
        scores = packed_scores(self.params, self.config, part.packed)
        lp_T = scores.logprobs_T
        # Tokens without a sampler log-prob (supervised data) are on-policy by definition.
        sampler_T = torch.where(part.sampler_logprobs_T.isnan(), lp_T.detach(), part.sampler_logprobs_T)
        losses = token_losses(loss, lp_T, sampler_T, part.advantages_T, part.completion_T, part.mask_T)
        # where, not a product with 0: a masked token must not turn an infinite loss into NaN.
        total = torch.where(part.mask_T > 0, losses.loss_T * part.weights_T, 0.0).sum()
        total.backward()
        sums.add(float(total.detach()), part.mask_T, scores.entropies_T, sampler_T - lp_T.detach(), losses.clipped_T)
        return float(total.detach())

    def _apply(self, step: StepSpec, norm: float) -> None:
        if step.max_grad_norm > 0:
            self.gradient.mul_(min(1.0, step.max_grad_norm / (norm + 1e-6)))
        if step.reset_optimizer:
            self.optimizer.reset()
        self.optimizer.apply(self.flat, self.gradient, step)


class _Sums:
    """Running sums over micro-batches."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._tokens = 0.0
        self._entropy = 0.0
        self._gap = 0.0
        self._largest_gap = 0.0
        self._clipped = 0.0

    def add(self, loss: float, mask_T: Tensor, entropies_T: Tensor, gap_T: Tensor, clipped_T: Tensor) -> None:
        self._loss += loss
        self._tokens += float(mask_T.sum())
        self._entropy += float(entropies_T @ mask_T)
        self._gap += float(gap_T @ mask_T)
        self._largest_gap = max(self._largest_gap, float((gap_T * mask_T).abs().max()))
        self._clipped += float((clipped_T * mask_T).sum())

    def figures(self, seconds: float) -> BatchFigures:
        tokens = max(1.0, self._tokens)
        return BatchFigures(
            loss=self._loss,
            tokens=int(self._tokens),
            entropy=self._entropy / tokens,
            kl_sample_train=self._gap / tokens,
            max_logprob_gap=self._largest_gap,
            clip_fraction=self._clipped / tokens,
            seconds=seconds,
        )


def _in_huge_pages(size: int) -> Tensor:
    """`size` zeros, in huge pages where the kernel has them: out of pages of 4 KiB the cast of a publish took 1.4 times
    the processor time (measured, float32 to bfloat16).
    """
    return torch.frombuffer(private(4 * size), dtype=torch.float32)


def _offsets(params: Mapping[str, Tensor]) -> dict[str, int]:
    offsets: dict[str, int] = {}
    position = 0
    for name, tensor in params.items():
        offsets[name] = position
        position += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
    return offsets
