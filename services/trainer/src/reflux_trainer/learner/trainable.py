"""Parameters that learn: weights, gradient and AdamW moments in flat buffers, and the step that moves them."""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from reflux_model.parameters import Parameters
from reflux_trainer.learner.adamw import FlatAdamW
from reflux_trainer.learner.ops import StepFigures, StepSpec
from reflux_transfer.memory import private

_ALIGNMENT = 64
"""Elements; each parameter starts on a 256-byte boundary of the flat buffers."""


class Trainable:
    """A model or an adapter of one.

    Gradients of several backward passes add up until `optim_step` applies and clears them. A loss or gradient that is
    not finite poisons the step: it is refused, counted in `refused_steps`, and the gradient is dropped. Not
    thread-safe: one thread owns it.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.version = 0
        self.refused_steps = 0
        self.offsets = _offsets(params)
        size = sum(-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in params.values())
        self.flat = _in_huge_pages(size)
        self._shapes = {name: tensor.shape for name, tensor in params.items()}
        self._leaves = {name: view.requires_grad_() for name, view in self.views(self.flat).items()}
        for name, leaf in self._leaves.items():
            leaf.data.copy_(params[name])
        self._gradient: Tensor | None = None
        self.optimizer = FlatAdamW()
        self.accumulated = False
        self.poisoned = False
        self.reference: Tensor | None = None
        """Frozen copy of `flat`, the policy that a KL term is taken to; None until it is asked for."""

    @property
    def params(self) -> Parameters:
        """The weights by name; views that every step changes."""
        return self._leaves

    @property
    def gradient(self) -> Tensor:
        """Of all parameters, flat. It takes memory from its first use on: the base of adapters has none."""
        if self._gradient is None:
            self._gradient = torch.zeros(self.flat.numel())
            for name, view in self.views(self._gradient).items():
                self._leaves[name].grad = view
        return self._gradient

    def expect_gradient(self) -> None:
        """To be called before a pass adds to it: a leaf without one would get one of its own."""
        self.accumulated = True
        _ = self.gradient

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views into a flat buffer that is laid out as the parameters."""
        return {
            name: flat[start : start + math.prod(self._shapes[name])].view(self._shapes[name])
            for name, start in self.offsets.items()
        }

    def keep_reference(self) -> Tensor:
        """The reference; the first call makes the present weights it."""
        if self.reference is None:
            self.reference = _in_huge_pages(self.flat.numel()).copy_(self.flat)
        return self.reference

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
        self.forget_gradient()
        return StepFigures(norm, self.version, applied, time.perf_counter() - started)

    def forget_gradient(self) -> None:
        """Drops what has accumulated."""
        if self._gradient is not None:
            self._gradient.zero_()
        self.accumulated, self.poisoned = False, False

    def _apply(self, step: StepSpec, norm: float) -> None:
        if step.max_grad_norm > 0:
            self.gradient.mul_(min(1.0, step.max_grad_norm / (norm + 1e-6)))
        if step.reset_optimizer:
            self.optimizer.reset()
        self.optimizer.apply(self.flat, self.gradient, step)


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
