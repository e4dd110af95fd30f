"""The learner's arithmetic: forward, loss and backward of batches, for the model itself or for adapters of it."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.folder import load_folder
from reflux_model.lora import AdaptedRows, LoraProjections
from reflux_model.packing import PackedRows, join_rows
from reflux_model.parameters import Parameters
from reflux_model.replay import replayed_logprobs
from reflux_model.scoring import TokenScores
from reflux_model.training import packed_scores
from reflux_trainer.learner.batching import (
    MAX_ATTENTION_CELLS,
    MICRO_BATCH_TOKENS,
    MicroBatch,
    Placed,
    micro_batches,
    pack_placed,
    parts_of,
)
from reflux_trainer.learner.critic import Critic, value_losses
from reflux_trainer.learner.figures import BatchSums
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.losses.batch import TokenBatch
from reflux_trainer.learner.losses.kl import kl_term
from reflux_trainer.learner.losses.registry import token_losses
from reflux_trainer.learner.numerics import FLOAT32, Numerics
from reflux_trainer.learner.ops import BatchFigures, GroupData, LossSpec, StepFigures, StepSpec
from reflux_trainer.learner.trainable import Trainable


@dataclass(frozen=True)
class AdapterJob:
    """One adapter's batch."""

    adapter: LoraAdapter
    groups: Sequence[GroupData]
    loss: LossSpec


class Learner(Trainable):
    """Model and optimizer of one run. Each `forward_backward` call is normalised by its own batch."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Tensor], seed: int, numerics: Numerics = FLOAT32
    ) -> None:
        super().__init__(params)
        self.config, self.numerics = config, numerics
        self.generator = torch.Generator().manual_seed(seed)
        self.critic: Critic | None = None
        """None until a loss with a critic, or its values, are asked for."""

    @classmethod
    def from_folder(cls, folder: Path, seed: int, numerics: Numerics = FLOAT32) -> "Learner":
        """Loads a Hugging Face folder; errors as in `reflux_model.folder.load_folder`."""
        config, params = load_folder(folder)
        return cls(config, params, seed, numerics)

    def forward_backward(
        self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int = 0, *, outputs: bool = False
    ) -> BatchFigures:
        """Adds the gradient of one batch; `micro_batch` bounds the completions of a part, 0 its tokens only.

        With `outputs` the figures hold the log-probs of all completions, in the order of the batch.
        """
        started = time.perf_counter()
        sums = BatchSums(_count(groups))
        poisoned, self.poisoned = self.poisoned, True  # what an exception leaves behind is half a gradient
        self.expect_gradient()
        reference = self.views(self.keep_reference()) if loss.own_reference else {}
        for each in micro_batches(groups, loss, micro_batch):
            part = self._with_reference(each, loss, reference)
            scores = self._scores(part.placed, part.packed, None, self.params)
            total = total_loss(part, scores, loss, sums)
            if loss.value_coefficient > 0:
                total = total + loss.value_coefficient * self._value_loss(part, scores, loss, sums)
            total.backward()
            poisoned |= not math.isfinite(float(total.detach()))
        self.poisoned = poisoned
        return sums.figures(time.perf_counter() - started, outputs=outputs)

    def adapters_forward_backward(self, jobs: Sequence[AdapterJob]) -> list[BatchFigures]:
        """Adds the gradients of several adapters' batches (of different ones), computed side by side in shared passes.

        The model's own gradient stays as it is. The figures hold all log-probs.
        """
        started = time.perf_counter()
        base = self._frozen()
        sums = [BatchSums(_count(job.groups)) for job in jobs]
        poisoned = [job.adapter.poisoned for job in jobs]
        for job in jobs:
            job.adapter.poisoned = True
            job.adapter.expect_gradient()
        streams = [
            (self._with_reference(part, job.loss, base) for part in micro_batches(job.groups, job.loss)) for job in jobs
        ]
        for parts in _together(streams):
            members = [(jobs[index].adapter, part.packed) for index, part in parts]
            total = torch.zeros(())
            for (index, part), scores in zip(parts, self._adapter_scores(base, members), strict=True):
                own = total_loss(part, scores, jobs[index].loss, sums[index])
                poisoned[index] |= not math.isfinite(float(own.detach()))
                total = total + own
            total.backward()
        for job, state in zip(jobs, poisoned, strict=True):
            job.adapter.poisoned = state
        seconds = time.perf_counter() - started
        return [each.figures(seconds, outputs=True) for each in sums]

    @torch.no_grad()
    def score(self, groups: Sequence[GroupData], micro_batch: int = 0) -> list[list[list[float]]]:
        """Log-probs of every completion's tokens under the present weights: [group][completion][token]."""
        rows = iter(self.rescored(groups, None, None, micro_batch).logprobs)
        return [[list(next(rows)) for _ in group.completions] for group in groups]

    @torch.no_grad()
    def rescored(
        self,
        groups: Sequence[GroupData],
        adapter: LoraAdapter | None,
        loss: LossSpec | None,
        micro_batch: int = 0,
        *,
        reference: bool = False,
        values: bool = False,
    ) -> BatchFigures:
        """Log-probs under the present weights, of an adapter or without, and the figures of a loss if one is given.

        With `reference` the log-probs are those of the reference: for an adapter the model without it. With `values`
        the critic's values stand in the place of log-probs.
        """
        started = time.perf_counter()
        sums = BatchSums(_count(groups))
        own = self.params if self.reference is None or adapter is not None else self.views(self.reference)
        weights, adapter = (own, None) if reference else (self.params, adapter)
        if loss is not None:
            for each in micro_batches(groups, loss, micro_batch):
                part = self._with_reference(each, loss, own)
                total_loss(part, self._scores(part.placed, part.packed, adapter, weights), loss, sums)
        else:
            for placed in parts_of(groups, micro_batch):
                lengths = [len(each.token_ids) for piece in placed for each in piece.group.completions]
                places = [place for piece in placed for place in piece.places]
                scores = self._scores(placed, pack_placed(placed), adapter, weights)
                sums.keep(places, self._values(scores) if values else scores.logprobs_T, lengths)
        return sums.figures(time.perf_counter() - started, outputs=True)

    def optim_step(self, step: StepSpec) -> StepFigures:
        """See `Trainable`; the critic's head steps with the model."""
        figures = super().optim_step(step)
        if self.critic is not None and figures.applied and self.critic.accumulated:
            self.critic.optim_step(replace(step, learning_rate=step.critic_learning_rate))
        elif self.critic is not None:
            self.critic.forget_gradient()
        return figures

    def keep_critic(self) -> Critic:
        """The value head; the first call makes it."""
        if self.critic is None:
            self.critic = Critic(self.config.hidden_size)
        return self.critic

    def _values(self, scores: TokenScores) -> Tensor:
        assert scores.hidden_TE is not None
        return self.keep_critic().values(scores.hidden_TE)

    def _value_loss(self, part: MicroBatch, scores: TokenScores, loss: LossSpec, sums: BatchSums) -> Tensor:
        """The critic's loss of a micro-batch, weighted as the policy's tokens are, and booked in `sums`."""
        self.keep_critic().expect_gradient()
        losses_T = value_losses(self._values(scores), part, loss)
        sums.add_values(part, losses_T)
        return torch.where(part.mask_T > 0, losses_T * part.weights_T, 0.0).sum()

    @torch.no_grad()
    def _with_reference(self, part: MicroBatch, loss: LossSpec, reference: Parameters) -> MicroBatch:
        """The part with log-probs under `reference` where it has none and the loss asks for them."""
        if not loss.own_reference or not part.reference_logprobs_T.isnan().any():
            return part
        scores = packed_scores(self.numerics.cast(reference), self.config, part.packed)
        given_T = part.reference_logprobs_T
        return replace(part, reference_logprobs_T=torch.where(given_T.isnan(), scores.logprobs_T, given_T))

    def _scores(
        self, placed: Sequence[Placed], packed: PackedRows, adapter: LoraAdapter | None, weights: Parameters
    ) -> TokenScores:
        if adapter is not None:
            return self._adapter_scores(self._frozen(), [(adapter, packed)])[0]
        params, recompute = self.numerics.cast(weights), self.numerics.recompute
        scores = packed_scores(params, self.config, packed, recompute=recompute)
        if not self.numerics.deterministic:
            return scores
        # The engine's value with the gradient of the packed pass.
        slope_T = scores.logprobs_T - scores.logprobs_T.detach()
        return replace(scores, logprobs_T=self._replayed(params, placed) + slope_T)

    def _replayed(self, params: Parameters, placed: Sequence[Placed]) -> Tensor:
        groups = [piece.group for piece in placed]
        rows = [
            replayed_logprobs(params, self.config, group.prompt, completion.token_ids, completion.fed_ids)
            for group in groups
            for completion in group.completions
        ]
        return torch.cat(rows)

    def _frozen(self) -> Parameters:
        return self.numerics.cast({name: tensor.detach() for name, tensor in self.params.items()})

    def _adapter_scores(self, base: Parameters, members: Sequence[tuple[LoraAdapter, PackedRows]]) -> list[TokenScores]:
        """One pass over the rows of several adapters; scores of each."""
        parts, row, token = [], 0, 0
        for adapter, packed in members:
            rows, tokens = slice(row, row + len(packed.tokens_RS)), slice(token, token + len(packed.targets_T))
            parts.append(AdaptedRows(rows, tokens, self.numerics.cast(adapter.params), adapter.spec))
            row, token = rows.stop, tokens.stop
        joined = join_rows([packed for _, packed in members])
        projections, recompute = LoraProjections(parts), self.numerics.recompute
        scores = packed_scores(base, self.config, joined, projections=projections, recompute=recompute)
        return [TokenScores(scores.logprobs_T[part.tokens], scores.entropies_T[part.tokens]) for part in parts]


def total_loss(part: MicroBatch, scores: TokenScores, loss: LossSpec, sums: BatchSums) -> Tensor:
    """Weighted sum of a micro-batch's token losses, booked in `sums`."""
    lp_T = scores.logprobs_T
    present_T = lp_T.detach()
    # Tokens without a sampler log-prob (supervised data) are on-policy by definition.
    sampler_T = torch.where(part.sampler_logprobs_T.isnan(), present_T, part.sampler_logprobs_T)
    default_T = present_T if loss.decoupled else sampler_T
    proximal_T = torch.where(part.proximal_logprobs_T.isnan(), default_T, part.proximal_logprobs_T)
    batch = TokenBatch(
        logprobs_T=lp_T,
        old_logprobs_T=proximal_T,
        sampler_logprobs_T=sampler_T,
        reference_logprobs_T=part.reference_logprobs_T,
        advantages_T=part.advantages_T,
        completion_T=part.completion_T,
        mask_T=part.mask_T,
    )
    losses = token_losses(loss, batch)
    # where, not a product with 0: a masked token must not turn an infinite loss into NaN.
    total = torch.where(part.mask_T > 0, losses.loss_T * part.weights_T, 0.0).sum()
    sums.add(part, scores, sampler_T, losses.clipped_T, float(total.detach()))
    if loss.kl_coefficient > 0 or loss.own_reference:
        sums.add_reference(part, kl_term(batch, replace(loss, kl_estimator="k3")))
    return total


def _together(streams: Sequence[Iterator[MicroBatch]]) -> Iterator[list[tuple[int, MicroBatch]]]:
    """Micro-batches of different streams that fit one pass, each with the number of its stream."""
    for heads in zip_longest(*streams):
        taken: list[tuple[int, MicroBatch]] = []
        for entry in ((index, part) for index, part in enumerate(heads) if part is not None):
            if taken and not _fits([part.packed for _, part in [*taken, entry]]):
                yield taken
                taken = []
            taken.append(entry)
        yield taken


def _fits(parts: Sequence[PackedRows]) -> bool:
    width = max(part.tokens_RS.shape[1] for part in parts)
    rows = sum(part.tokens_RS.shape[0] for part in parts)
    return rows * width <= MICRO_BATCH_TOKENS and rows * width**2 <= MAX_ATTENTION_CELLS


def _count(groups: Sequence[GroupData]) -> int:
    return sum(len(group.completions) for group in groups)
