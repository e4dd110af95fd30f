"""A LoRA adapter of the learner's model: factors, gradient, moments and operations of its own."""

from collections.abc import Mapping

from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.lora import LoraSpec, initial_factors
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.trainable import Trainable

KEPT_ANSWERS = 16
"""Answers hold the log-probs of whole batches, so fewer are kept than of the model itself."""


class LoraAdapter(Trainable):
    """What one adapter owns; the base's weights are not its affair."""

    def __init__(self, spec: LoraSpec, factors: Mapping[str, Tensor], journal: Journal | None = None) -> None:
        super().__init__(factors)
        self.spec = spec
        self.journal = journal or Journal(kept=KEPT_ANSWERS)

    @classmethod
    def fresh(cls, config: ModelConfig, spec: LoraSpec, seed: int) -> "LoraAdapter":
        """An adapter that changes nothing yet. Raises `UnsupportedModelError` for a target that the model lacks."""
        return cls(spec, initial_factors(config, spec, seed))
