"""A sharded model as rank 0's process sees it: the calls of `core.Learner`, made on all ranks at once."""

import time
from collections.abc import Sequence

from reflux_kit.errors import WrongState
from reflux_model.config import ModelConfig
from reflux_model.parameters import Parameters
from reflux_trainer.learner.figures import BatchSums
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.ops import BatchFigures, GroupData, LossSpec, StepFigures, StepSpec
from reflux_trainer.learner.ranks.group import RankGroup

_NO_CRITIC = "a critic needs a learner of one rank: set REFLUX_LEARNER_RANKS to 1"
_SCORING = LossSpec(name="cross_entropy")


class ShardedLearner:
    """One model on several ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.version = group.works.member.version
        self.refused_steps = group.works.member.refused_steps

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._group.works.member.config

    @property
    def params(self) -> Parameters:
        """Rank 0's slices."""
        return self._group.works.member.shards

    def forward_backward(
        self, groups: Sequence[GroupData], loss: LossSpec, micro_batch: int = 0, *, outputs: bool = False
    ) -> BatchFigures:
        """See `Learner`; micro-batches are dealt to the ranks."""
        if loss.value_coefficient > 0:
            raise WrongState(_NO_CRITIC)
        started = time.perf_counter()
        sums = self._merged("forward_backward", groups, loss, micro_batch)
        return sums.figures(time.perf_counter() - started, outputs=outputs)

    def optim_step(self, step: StepSpec) -> StepFigures:
        """See `Trainable`."""
        started = time.perf_counter()
        norm, applied = self._group.everywhere("optim_step", step)[0]
        member = self._group.works.member
        self.version, self.refused_steps = member.version, member.refused_steps
        return StepFigures(norm, self.version, applied, time.perf_counter() - started)

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
        """See `Learner`; a sharded model has neither adapters nor a critic."""
        assert adapter is None
        if values:
            raise WrongState(_NO_CRITIC)
        started = time.perf_counter()
        sums = self._merged("rescored", groups, loss or _SCORING, micro_batch, reference)
        return sums.figures(time.perf_counter() - started, outputs=True)

    def score(self, groups: Sequence[GroupData], micro_batch: int = 0) -> list[list[list[float]]]:
        """See `Learner`."""
        rows = iter(self.rescored(groups, None, None, micro_batch).logprobs)
        return [[list(next(rows)) for _ in group.completions] for group in groups]

    def _merged(self, method: str, *arguments: object) -> BatchSums:
        whole: BatchSums
        whole, *others = self._group.everywhere(method, *arguments)
        for other in others:
            whole.merge(other)
        return whole
