"""The closed vocabulary of the task and its prompts: 6 element slots, 12 peaks as angle words, then `<ans>`.

The peaks come by falling intensity, so that their rank carries it; one angle word covers 0.4 degrees of two-theta.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from reflux_tasks.xrd.patterns import MAX_PEAKS, TWO_THETA_MAX_DEGREES, TWO_THETA_MIN_DEGREES
from reflux_tasks.xrd.phases import Phase

ANGLE_BIN_DEGREES = 0.4
NUM_ANGLE_WORDS = round((TWO_THETA_MAX_DEGREES - TWO_THETA_MIN_DEGREES) / ANGLE_BIN_DEGREES)
ELEMENT_SLOTS = 6
PROMPT_WORDS = ELEMENT_SLOTS + MAX_PEAKS + 1
NO_ELEMENT, NO_PEAK, ANSWER = "<noel>", "<nopk>", "<ans>"
_MARKS = ("<pad>", "<eos>", "<sep>", ANSWER, NO_ELEMENT, NO_PEAK)
_NUM_INTENSITY_WORDS = 8
"""Words i0..i7 of intensity octaves: part of the vocabulary, unused by prompts of this length."""


class Vocabulary:
    """Words of a set of phases; their order is fixed by the phases alone."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.elements = tuple(sorted({element for phase in phases for element in phase.elements}))
        labels = {word for phase in phases for word in phase.label} - set(self.elements)
        intensities = [f"i{k}" for k in range(_NUM_INTENSITY_WORDS)]
        self.words = (*_MARKS, *intensities, *self.angle_words, *self.elements, *sorted(labels))

    @cached_property
    def angle_words(self) -> tuple[str, ...]:
        return tuple(f"t{k}" for k in range(NUM_ANGLE_WORDS))

    def prompt(self, elements: Iterable[str], two_theta: np.ndarray) -> list[str]:
        """The 19 words of a prompt; `elements` at most 6, `two_theta` in degrees by falling intensity, at most 12."""
        slots = list(elements)
        bins = ((two_theta - TWO_THETA_MIN_DEGREES) / ANGLE_BIN_DEGREES).astype(int)
        peaks = [self.angle_words[min(bin_, NUM_ANGLE_WORDS - 1)] for bin_ in bins.tolist()]
        slots += [NO_ELEMENT] * (ELEMENT_SLOTS - len(slots))
        peaks += [NO_PEAK] * (MAX_PEAKS - len(peaks))
        return [*slots, *peaks, ANSWER]

    def angle_embedding(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray]:
        """Token id of the first angle word and rows [angle words, hidden_size] of Fourier features with small noise.

        Half of the columns are sine and cosine waves over the angle range, so that close angles start close.
        """
        position = np.arange(NUM_ANGLE_WORDS)[:, None] / NUM_ANGLE_WORDS
        waves = 2.0 ** np.linspace(0, np.log2(NUM_ANGLE_WORDS / 2.5), hidden_size // 4)[None]
        features = np.concatenate([np.sin(np.pi * position * waves), np.cos(np.pi * position * waves)], axis=1)
        rows = 0.004 * np.random.default_rng(seed).standard_normal((NUM_ANGLE_WORDS, hidden_size))
        rows[:, : features.shape[1]] += 0.04 * features
        return self.words.index(self.angle_words[0]), rows.astype(np.float32)
