"""The closed vocabulary of the task: numbers on grids that are fine enough for matching and for a potential.

Lengths step by 1 % from 2 to 45 A, angles by a degree, coordinates by 1/240, so that special positions are exact to
four decimals. The parser reads any decimals: the grid is the vocabulary's, not the grammar's.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from reflux_tasks.canonical import END, PAD
from reflux_tasks.chemistry.symmetry import CELL_PARAMETERS, crystal_system
from reflux_tasks.csp.answers import formula_words
from reflux_tasks.csp.references import Reference

ANSWER, NOTHING = "<ans>", "<none>"
COORDINATE_STEPS = 240
SHORTEST_ANGSTROM, LONGEST_ANGSTROM, LENGTH_STEP = 2.0, 45.0, 0.01
ANGLES = range(60, 151)
ELEMENT_SLOTS = 5
PROMPT_WORDS = 2 * ELEMENT_SLOTS + 2


class Vocabulary:
    """Words for a set of references; their order is fixed by the references alone."""

    def __init__(self, references: Sequence[Reference]) -> None:
        self.elements = tuple(sorted({element for reference in references for element in reference.amounts}))
        groups = sorted({reference.phase.space_group for reference in references})
        largest = max(count for reference in references for count in reference.amounts.values())
        counts = [f"n{count}" for count in range(2, largest + 1)]
        marks = (PAD, END, ANSWER, NOTHING)
        self.words = (
            *marks,
            *counts,
            *(f"sg{group}" for group in groups),
            *self.elements,
            *map(str, ANGLES),
            *self.length_words,
            *self.coordinate_words,
        )

    @cached_property
    def length_words(self) -> tuple[str, ...]:
        steps = round(math.log(LONGEST_ANGSTROM / SHORTEST_ANGSTROM) / LENGTH_STEP)
        return tuple(f"{SHORTEST_ANGSTROM * math.exp(LENGTH_STEP * k):.3f}" for k in range(steps + 1))

    @cached_property
    def coordinate_words(self) -> tuple[str, ...]:
        return tuple(f"{k / COORDINATE_STEPS:.4f}" for k in range(COORDINATE_STEPS))

    def prompt(self, amounts: dict[str, int], space_group: int | None) -> list[str]:
        """The 12 words of a prompt: composition, space group or nothing, `<ans>`."""
        slots: list[str] = []
        for element, count in amounts.items():
            slots += [element, NOTHING if count == 1 else f"n{count}"]
        slots += [NOTHING] * (2 * ELEMENT_SLOTS - len(slots))
        return [*slots, NOTHING if space_group is None else f"sg{space_group}", ANSWER]

    def answer(self, reference: Reference) -> list[str]:
        """The reference in the words of the vocabulary, end word included."""
        names = CELL_PARAMETERS[crystal_system(reference.phase.space_group)]
        words = [*formula_words(reference.amounts), f"sg{reference.phase.space_group}"]
        for name, value in zip(names, reference.cell_parameters, strict=True):
            words.append(self._length(value) if name in "abc" else str(round(value)))
        for element, site in zip(reference.phase.species, reference.phase.coords, strict=True):
            words += [element, *(self._coordinate(value) for value in site)]
        return [*words, END]

    def _length(self, angstrom: float) -> str:
        step = round(math.log(angstrom / SHORTEST_ANGSTROM) / LENGTH_STEP)
        return self.length_words[min(max(step, 0), len(self.length_words) - 1)]

    def _coordinate(self, fraction: float) -> str:
        return self.coordinate_words[round(fraction * COORDINATE_STEPS) % COORDINATE_STEPS]

    def fits(self, reference: Reference) -> bool:
        """Whether the grids hold the reference."""
        lengths = np.linalg.norm(reference.phase.lattice, axis=1)
        return bool((lengths >= SHORTEST_ANGSTROM * 0.99).all() and (lengths <= LONGEST_ANGSTROM).all())

    def number_rows(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray]:
        """First token id and rows [words, hidden_size] of lengths and coordinates as waves: close numbers are close."""
        rng = np.random.default_rng(seed)
        blocks = [_waves(len(words), hidden_size) for words in (self.length_words, self.coordinate_words)]
        rows = 0.04 * np.concatenate(blocks)
        rows += 0.004 * rng.standard_normal(rows.shape)
        return self.words.index(self.length_words[0]), rows.astype(np.float32)


def _waves(count: int, hidden_size: int) -> np.ndarray:
    """Sine and cosine waves over a range of numbers in half of the columns [count, hidden_size]."""
    rows = np.zeros((count, hidden_size))
    position = np.arange(count)[:, None] / count
    waves = 2.0 ** np.linspace(0, np.log2(count / 2.5), hidden_size // 4)[None]
    features: Iterable[np.ndarray] = (np.sin(np.pi * position * waves), np.cos(np.pi * position * waves))
    stacked = np.concatenate(list(features), axis=1)
    rows[:, : stacked.shape[1]] = stacked
    return rows
