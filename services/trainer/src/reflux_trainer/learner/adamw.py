"""AdamW on flat buffers. Decoupled weight decay, arXiv 1711.05101; equal to torch.optim.AdamW, which the tests compare.

torch's own optimizers import its compiler on first use, which takes seconds of every start.
"""

import math

import torch
from torch import Tensor

from reflux_trainer.learner.ops import StepSpec

_PART = 1 << 18
"""Elements that are stepped together: what six passes go over stays in the cache, and the denominator is small."""


class FlatAdamW:
    """Moments of one flat parameter; they appear with the first step and go with `reset`."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps since the moments began: the bias correction's exponent."""
        self.mean: Tensor | None = None
        self.square: Tensor | None = None

    def begin(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The moments, zeros when there are none yet."""
        if self.mean is None or self.square is None:
            self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)
        return self.mean, self.square

    def reset(self) -> None:
        """Forgets the moments."""
        self.steps, self.mean, self.square = 0, None, None

    @torch.no_grad()
    def apply(self, flat: Tensor, gradient: Tensor, spec: StepSpec) -> None:
        """One step, in place: p -= lr * (wd * p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))."""
        moments = self.begin(flat)
        self.steps += 1
        whole = (each.view(-1).split(_PART) for each in (flat, gradient, *moments))
        for weights, slopes, mean, square in zip(*whole, strict=True):
            self._apply(weights, slopes, mean, square, spec)

    def _apply(self, flat: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, spec: StepSpec) -> None:
        mean.lerp_(gradient, 1 - spec.beta1)
        square.mul_(spec.beta2).addcmul_(gradient, gradient, value=1 - spec.beta2)
        scale = math.sqrt(1 - spec.beta2**self.steps)
        denominator = square.sqrt().div_(scale).add_(spec.eps)
        flat.mul_(1 - spec.learning_rate * spec.weight_decay)
        flat.addcdiv_(mean, denominator, value=-spec.learning_rate / (1 - spec.beta1**self.steps))
