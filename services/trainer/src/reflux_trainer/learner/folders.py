"""Where a model comes from."""

from dataclasses import dataclass
from pathlib import Path

from reflux_trainer.learner.numerics import FLOAT32, Numerics


@dataclass(frozen=True)
class Source:
    """Which model to make: a folder in Hugging Face layout, and what it does not say."""

    folder: Path
    seed: int
    numerics: Numerics = FLOAT32
