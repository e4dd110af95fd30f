"""X-ray phase identification: from the strongest peaks and a list of elements, name the phase or phases."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from reflux_tasks.options import InvalidOption, parse_options
from reflux_tasks.streams import STREAMS, problem_generator
from reflux_tasks.task import Problem, Split, Task
from reflux_tasks.verify import Verifier
from reflux_tasks.xrd.answers import format_answer
from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.full import FullVerifier
from reflux_tasks.xrd.label import LabelVerifier
from reflux_tasks.xrd.patterns import LEVELS, LevelName, Pattern, make_pattern
from reflux_tasks.xrd.phases import Phase, load_phases
from reflux_tasks.xrd.surrogate import SurrogateVerifier
from reflux_tasks.xrd.vocabulary import ELEMENT_SLOTS, Vocabulary

HELDOUT_PAIR_SHARE = 4
"""One pair of phases in four is held out."""
PROSE_PEAKS = 6
MAX_LISTED_PHASES = 12
"""First word of every generator seed: no two splits share a stream."""


@dataclass(frozen=True, kw_only=True)
class XrdOptions:
    """Options of the task in a run file."""

    num_phases: int = 128
    """Size of the fixed random subset of the collection (at most 255)."""
    warmup_level: LevelName = "clean"
    train_level: LevelName = "noisy"
    heldout_level: LevelName = "noisy"
    warmup_mixtures: float = 0.2
    """Share of two-phase problems."""
    train_mixtures: float = 0.3
    heldout_mixtures: float = 0.3
    max_distractors: int = 3
    """Largest number of elements in the prompt that are not in the sample."""
    peaks_hidden: bool = False
    """Control: the prompt shows the elements only."""
    elements_hidden: bool = False
    """Harder variant: the prompt shows the peaks only."""
    heldout_seed: int = 0
    """Seed of the held-out problems; apart from the run's seed, so that runs are judged on equal problems."""

    def __post_init__(self) -> None:
        for name in ("warmup_mixtures", "train_mixtures", "heldout_mixtures"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidOption(name, getattr(self, name), "use a share from 0.0 to 1.0, for example 0.3")
        if not 0 <= self.max_distractors < ELEMENT_SLOTS:
            raise InvalidOption("max_distractors", self.max_distractors, f"use 0 to {ELEMENT_SLOTS - 1}")
        if not 2 <= self.num_phases <= 255:
            raise InvalidOption("num_phases", self.num_phases, "use 2 to 255; the recipe has 128")
        if self.heldout_seed < 0:
            raise InvalidOption("heldout_seed", self.heldout_seed, "use 0 or more")
        if self.peaks_hidden and self.elements_hidden:
            raise InvalidOption("elements_hidden", True, "hide the peaks or the elements, not both")


@dataclass(frozen=True)
class XrdProblem(Problem):
    """One pattern with its truth."""

    phase_ids: tuple[int, ...]
    """Positions in the task's phases; the phase with the strongest line first."""
    elements: tuple[str, ...]
    """Elements of the sample and the distractors, sorted."""
    pattern: Pattern
    noise_seed: int
    """Seed of the counting statistics when a profile is simulated for the full verifier."""


class XrdTask(Task[XrdProblem]):
    """See the contract of Task; recipe and figures are in docs/science-xrd.md."""

    name: ClassVar[str] = "xrd-phase-id"
    max_answer_words: ClassVar[int] = 12

    def __init__(self, seed: int, cache_dir: Path, options: XrdOptions) -> None:
        if seed < 0:
            raise InvalidOption("seed", seed, "use 0 or more")
        self.seed = seed
        self.cache_dir = cache_dir
        self.options = options

    @classmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        return cls(seed, cache_dir, parse_options(XrdOptions, options))

    @cached_property
    def phases(self) -> list[Phase]:
        return load_phases(self.cache_dir, self.options.num_phases)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.phases)

    @property
    def words(self) -> Sequence[str]:
        return self.vocabulary.words

    @cached_property
    def verifiers(self) -> Mapping[str, Verifier]:
        database = PhaseDatabase(self.cache_dir)
        verifiers = (LabelVerifier(), SurrogateVerifier(database), FullVerifier(database))
        return {verifier.name: verifier for verifier in verifiers}

    def problem(self, split: Split, index: int) -> XrdProblem:
        rng = problem_generator(split, index, self.seed, self.options.heldout_seed)
        phase_ids = self._draw_phases(split, rng)
        level = LEVELS[getattr(self.options, f"{split}_level")]
        pattern = make_pattern([self.phases[i] for i in phase_ids], level, rng)
        elements = self._draw_elements(phase_ids, rng)
        return XrdProblem(split, index, phase_ids, elements, pattern, int(rng.integers(2**31)))

    def stratum(self, problem: XrdProblem) -> str:
        """By the number of phases."""
        return f"{len(problem.phase_ids)}_phases"

    def _draw_phases(self, split: Split, rng: np.random.Generator) -> tuple[int, ...]:
        if rng.random() >= getattr(self.options, f"{split}_mixtures"):
            return (int(rng.integers(len(self.phases))),)
        pairs = self.pairs[split == "heldout"]
        first, second = pairs[rng.integers(len(pairs))].tolist()
        return (first, second) if rng.random() < 0.5 else (second, first)

    def _draw_elements(self, phase_ids: Sequence[int], rng: np.random.Generator) -> tuple[str, ...]:
        present = {element for i in phase_ids for element in self.phases[i].elements}
        wanted = min(int(rng.integers(0, self.options.max_distractors + 1)), ELEMENT_SLOTS - len(present))
        absent = [element for element in self.vocabulary.elements if element not in present]
        chosen = rng.permutation(len(absent))[:wanted].tolist()
        return tuple(sorted(present | {absent[i] for i in chosen}))

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of phases [pairs, 2] for training, and those held out; a hash of their names decides."""
        groups: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for pair in combinations(range(len(self.phases)), 2):
            first, second = (self.phases[i] for i in pair)
            if len({*first.elements, *second.elements}) <= ELEMENT_SLOTS:
                key = "+".join(sorted((first.name, second.name))).encode()
                held_out = hashlib.blake2b(key, digest_size=4).digest()[0] % HELDOUT_PAIR_SHARE == 0
                groups[held_out].append(pair)
        return np.array(groups[0]), np.array(groups[1])

    def prompt_words(self, problem: XrdProblem) -> list[str]:
        elements = () if self.options.elements_hidden else problem.elements
        two_theta = problem.pattern.two_theta[:0] if self.options.peaks_hidden else problem.pattern.two_theta
        return self.vocabulary.prompt(elements, two_theta)

    def prose(self, problem: XrdProblem) -> str:
        """Names the phases where they are few; the six strongest peaks in degrees."""
        shown = problem.pattern.two_theta[:PROSE_PEAKS]
        lines = ["Which crystal phase fits this X-ray pattern?"]
        if not self.options.elements_hidden:
            lines.append(f"Elements: {' '.join(problem.elements)}")
        if not self.options.peaks_hidden:
            lines.append(f"Peaks: {' '.join(f'{angle:.1f}' for angle in shown)}")
        if len(self.phases) <= MAX_LISTED_PHASES:
            lines += ["Answer with one of:", *(" ".join(phase.label) for phase in self.phases)]
        return "\n".join(lines)

    def answer_words(self, problem: XrdProblem) -> list[str]:
        return format_answer([self.phases[i].label for i in problem.phase_ids])

    def truth(self, problem: XrdProblem) -> dict[str, Any]:
        """Payload of the verifiers: true phases with their strained cells, observed peaks, allowed elements."""
        pattern = problem.pattern
        phases = [
            {
                "label": " ".join(self.phases[i].label),
                "name": self.phases[i].name,
                "share": round(float(share), 6),
                "cell_scale": [round(float(factor), 8) for factor in scale],
            }
            for i, share, scale in zip(problem.phase_ids, pattern.shares, pattern.cell_scales, strict=True)
        ]
        return {
            "problem": f"{problem.split}/{problem.index}",
            "phases": phases,
            "elements": list(problem.elements),
            "two_theta_degrees": [round(float(angle), 5) for angle in pattern.two_theta],
            "intensity": [round(float(height), 6) for height in pattern.intensity],
            "zero_shift_degrees": round(pattern.zero_shift_degrees, 6),
            "noise_seed": problem.noise_seed,
        }

    def split_record(self) -> dict[str, Any]:
        pairs = [[self.phases[i].name for i in pair] for pair in self.pairs[1].tolist()]
        return {
            "task": self.name,
            "seed": self.seed,
            "options": {field.name: getattr(self.options, field.name) for field in fields(self.options)},
            "generator_streams": dict(STREAMS),
            "phases": [phase.name for phase in self.phases],
            "heldout_pairs": pairs,
        }

    def initial_embedding(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray]:
        return self.vocabulary.angle_embedding(hidden_size, seed)
