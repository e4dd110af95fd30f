"""One rank's part of a sharded model: its slices of weights, gradients and moments. All ranks make the same calls."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from reflux_model.config import ModelConfig
from reflux_model.scoring import TokenScores
from reflux_model.sharded import ShardedModel, local_gradients, local_shards, set_local_gradients, shard
from reflux_trainer.learner.adamw import FlatAdamW
from reflux_trainer.learner.batching import MicroBatch, micro_batches
from reflux_trainer.learner.core import total_loss
from reflux_trainer.learner.figures import BatchSums
from reflux_trainer.learner.numerics import Numerics
from reflux_trainer.learner.ops import GroupData, LossSpec, StepSpec


class ShardMember:
    """As `Trainable`, with every buffer a slice. Token weights are those of the whole batch, so gradients add up."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], numerics: Numerics, mesh: DeviceMesh) -> None:
        self.config, self.numerics = config, numerics
        self.rank, self.ranks = mesh.get_rank(), mesh.size()
        self.model = ShardedModel(config, params)
        shard(self.model, mesh, numerics.dtype)
        self.shards = local_shards(self.model)
        self.optimizers = {name: FlatAdamW() for name in self.shards}
        self.version = self.refused_steps = 0
        self.accumulated = self.poisoned = False
        self.reference: dict[str, Tensor] = {}
        """Slices of the reference, as `Trainable` has it; none until it is asked for."""

    def keep_reference(self) -> None:
        """See `Trainable`."""
        if not self.reference:
            self.reference = {name: shard.detach().clone() for name, shard in self.shards.items()}

    def forward_backward(self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int) -> BatchSums:
        """Adds the gradient of this rank's micro-batches; every rank goes through as many passes."""
        sums = BatchSums(sum(len(group.completions) for group in groups))
        poisoned, self.poisoned, self.accumulated = self.poisoned, True, True
        if loss.own_reference:
            self.keep_reference()
        for part, mine in self._referred(self._dealt(list(micro_batches(groups, loss, micro_batch))), loss):
            scores = TokenScores(*self.model(part.packed, self.numerics.recompute))
            total = total_loss(part, scores, loss, sums) if mine else 0.0 * scores.logprobs_T.sum()
            total.backward()
            poisoned |= not math.isfinite(float(total.detach()))
        self.poisoned = poisoned
        return sums

    @torch.no_grad()
    def rescored(self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int, reference: bool) -> BatchSums:
        """Log-probs and loss of this rank's micro-batches under the present weights, or under the reference."""
        sums = BatchSums(sum(len(group.completions) for group in groups))
        dealt = self._referred(self._dealt(list(micro_batches(groups, loss, micro_batch))), loss)
        with self._as_reference() if reference else nullcontext():
            for part, mine in dealt:
                scores = TokenScores(*self.model(part.packed))
                if mine:
                    total_loss(part, scores, loss, sums)
        return sums

    @torch.no_grad()
    def _referred(self, dealt: Sequence[tuple[MicroBatch, bool]], loss: LossSpec) -> Sequence[tuple[MicroBatch, bool]]:
        """As `Learner` does it, but for all parts at once, so that weights change places once. A part that has all its
        log-probs takes its pass too, since another rank's may not have them.
        """
        if not loss.own_reference:
            return dealt
        referred = []
        with self._as_reference():
            for part, mine in dealt:
                given_T, (own_T, _) = part.reference_logprobs_T, self.model(part.packed)
                referred.append(
                    (replace(part, reference_logprobs_T=torch.where(given_T.isnan(), own_T, given_T)), mine)
                )
        return referred

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The model with the reference's weights, if one is kept; its own come back bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Weights and reference change places, a tensor at a time: no third copy."""
        for name, kept in self.reference.items():
            present = self.shards[name].clone()
            self.shards[name].copy_(kept)
            kept.copy_(present)

    def optim_step(self, step: StepSpec) -> tuple[float, bool]:
        """The norm over all ranks, and whether the step was applied: all ranks do, or none does."""
        gradients = local_gradients(self.model)
        told = torch.zeros(2, dtype=torch.float64)
        told[0] = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
        told[1] = float(self.poisoned)
        dist.all_reduce(told)
        norm = math.sqrt(float(told[0])) if float(told[0]) >= 0 else math.nan
        applied = math.isfinite(norm) and not told[1]
        if applied:
            self._apply(gradients, step, norm)
            self.version += 1
        else:
            self.refused_steps += 1
        self.model.zero_grad(set_to_none=True)
        self.accumulated = self.poisoned = False
        return norm, applied

    def tensors(self) -> dict[str, Tensor]:
        """The slices that make up the state, named as in `learner.state`."""
        found = {f"param/{name}": tensor for name, tensor in self.shards.items()}
        for name, optimizer in self.optimizers.items():
            if optimizer.mean is not None and optimizer.square is not None:
                found |= {f"adam_m/{name}": optimizer.mean, f"adam_v/{name}": optimizer.square}
        if self.accumulated:
            found |= {f"gradient/{name}": tensor for name, tensor in local_gradients(self.model).items()}
        found |= {f"reference/{name}": tensor for name, tensor in self.reference.items()}
        return {name: tensor.detach() for name, tensor in found.items() if tensor.numel()}

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes slices of gradients in the place of those that there are."""
        set_local_gradients(self.model, gradients)

    def _dealt(self, parts: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """Every n-th part, and whether it is this rank's: the others fill up the last round, so that nobody waits."""
        rounds = -(-len(parts) // self.ranks)
        turns = [turn * self.ranks + self.rank for turn in range(rounds)]
        return [(parts[turn], True) if turn < len(parts) else (parts[0], False) for turn in turns]

    @torch.no_grad()
    def _apply(self, gradients: Mapping[str, Tensor], step: StepSpec, norm: float) -> None:
        scale = min(1.0, step.max_grad_norm / (norm + 1e-6)) if step.max_grad_norm > 0 else 1.0
        for name, weights in self.shards.items():
            optimizer = self.optimizers[name]
            if step.reset_optimizer:
                optimizer.reset()
            gradient = gradients.get(name)
            optimizer.apply(weights, torch.zeros_like(weights) if gradient is None else gradient * scale, step)
