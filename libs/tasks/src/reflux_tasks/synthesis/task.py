"""Synthesis planning: for a target oxide and a shelf with gaps, write a balanced recipe and its temperature."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from reflux_tasks.canonical import END, PAD
from reflux_tasks.chemistry.subset import small_parts
from reflux_tasks.options import InvalidOption, parse_options
from reflux_tasks.streams import STREAMS, problem_generator
from reflux_tasks.synthesis.answers import AND, AT, TO, Recipe, format_recipe
from reflux_tasks.synthesis.dft import DftVerifier
from reflux_tasks.synthesis.phases import TARGETS
from reflux_tasks.synthesis.shelf import GASES, PRECURSORS
from reflux_tasks.synthesis.temperature import mean_melting_point
from reflux_tasks.synthesis.units import atoms_of
from reflux_tasks.synthesis.verifiers import FullVerifier, RuleVerifier, SurrogateVerifier
from reflux_tasks.task import Problem, Split, Task
from reflux_tasks.verify import Verifier

HELDOUT_SHARE = 5
"""One target in five is held out."""
ANSWER, NOTHING = "<ans>", "<none>"
TARGET_SLOTS = 3
STRUCK_SLOTS = 2
LARGEST_AMOUNT = 9
KELVIN = range(400, 3001, 50)
_MELTING_SHARE = 0.62
"""The temperature of warm-up answers over the mean melting point of the precursors."""
_ATTEMPTS = 64


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """Options of the task."""

    max_struck: int = 2
    """Largest number of precursors that a problem takes from the shelf."""
    num_phases: int = 0
    """Targets to train on, a fixed random choice, and a quarter as many held-out ones; 0 takes all. 8 is easy."""
    heldout_seed: int = 0
    """Seed of the held-out problems; apart from the run's seed, so that runs are judged on equal problems."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_struck <= STRUCK_SLOTS:
            raise InvalidOption("max_struck", self.max_struck, f"use 0 to {STRUCK_SLOTS}")
        if self.num_phases < 0:
            raise InvalidOption("num_phases", self.num_phases, "use 1 or more, or 0 for all")
        if self.heldout_seed < 0:
            raise InvalidOption("heldout_seed", self.heldout_seed, "use 0 or more")


@dataclass(frozen=True)
class SynthesisProblem(Problem):
    """One target and what the shelf lacks."""

    target: str
    struck: tuple[str, ...]
    """Precursors that are not available, sorted."""


class SynthesisTask(Task[SynthesisProblem]):
    """See the contract of Task; rewards, rules and sources are in docs/science-synthesis.md."""

    name: ClassVar[str] = "synthesis-planning"
    max_answer_words: ClassVar[int] = 16

    def __init__(self, seed: int, cache_dir: Path, options: SynthesisOptions) -> None:
        if seed < 0:
            raise InvalidOption("seed", seed, "use 0 or more")
        self.seed = seed
        self.cache_dir = cache_dir
        self.options = options

    @classmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        return cls(seed, cache_dir, parse_options(SynthesisOptions, options))

    @cached_property
    def words(self) -> Sequence[str]:
        amounts = [str(count) for count in range(1, LARGEST_AMOUNT + 1)]
        elements = sorted({element for target in TARGETS for element in atoms_of(target)})
        counts = [f"n{count}" for count in range(2, LARGEST_AMOUNT + 1)]
        marks = (PAD, END, ANSWER, NOTHING, TO, AND, AT)
        return (*marks, *amounts, *elements, *counts, *sorted(PRECURSORS), *GASES, *map(str, KELVIN))

    @cached_property
    def verifiers(self) -> Mapping[str, Verifier]:
        verifiers = (RuleVerifier(), SurrogateVerifier(), FullVerifier(), DftVerifier(self.cache_dir))
        return {verifier.name: verifier for verifier in verifiers}

    @cached_property
    def parts(self) -> tuple[list[str], list[str]]:
        """Targets for training and those held out: a hash of the formula decides."""
        groups: tuple[list[str], list[str]] = ([], [])
        for target in TARGETS:
            held_out = hashlib.blake2b(target.encode(), digest_size=4).digest()[0] % HELDOUT_SHARE == 0
            groups[held_out].append(target)
        return small_parts(groups, self.options.num_phases)

    def problem(self, split: Split, index: int) -> SynthesisProblem:
        rng = problem_generator(split, index, self.seed, self.options.heldout_seed)
        targets = self.parts[split == "heldout"]
        target = targets[int(rng.integers(len(targets)))]
        return SynthesisProblem(split, index, target, self._strike(target, rng))

    def stratum(self, problem: SynthesisProblem) -> str:
        """By the number of precursors that are missing."""
        return f"{len(problem.struck)}_missing"

    def _strike(self, target: str, rng: np.random.Generator) -> tuple[str, ...]:
        """Sources of the target's metals to take away, so that one source of each is left."""
        wanted = int(rng.integers(0, self.options.max_struck + 1))
        sources = [name for metal in _metals(target) for name in _sources(metal)]
        for _ in range(_ATTEMPTS):
            struck = {sources[i] for i in rng.permutation(len(sources))[:wanted].tolist()}
            if all(set(_sources(metal)) - struck for metal in _metals(target)):
                return tuple(sorted(struck))
        return ()

    def prompt_words(self, problem: SynthesisProblem) -> list[str]:
        slots: list[str] = []
        for element, count in atoms_of(problem.target).items():
            slots += [element, NOTHING if count == 1 else f"n{count}"]
        slots += [NOTHING] * (2 * TARGET_SLOTS - len(slots))
        struck = [*problem.struck, *[NOTHING] * (STRUCK_SLOTS - len(problem.struck))]
        return [*slots, *struck, ANSWER]

    def answer_words(self, problem: SynthesisProblem) -> list[str]:
        return format_recipe(usual_recipe(problem.target, problem.struck))

    def truth(self, problem: SynthesisProblem) -> dict[str, Any]:
        available = [name for name in sorted(PRECURSORS) if name not in problem.struck]
        return {"target": problem.target, "available": available}

    def split_record(self) -> dict[str, Any]:
        return {
            "task": self.name,
            "seed": self.seed,
            "options": {field.name: getattr(self.options, field.name) for field in fields(self.options)},
            "generator_streams": dict(STREAMS),
            "targets": list(TARGETS),
            "heldout_targets": self.parts[1],
        }


def _metals(target: str) -> list[str]:
    return [element for element in atoms_of(target) if element != "O"]


def _sources(metal: str) -> list[str]:
    """Precursors of a metal, the usual one first: what gives off a gas keeps better than the bare oxide."""
    found = [row for row in PRECURSORS.values() if metal in atoms_of(row.formula)]
    return [row.formula for row in sorted(found, key=lambda row: (row.gas != "CO2", row.gas == ""))]


def usual_recipe(target: str, struck: Sequence[str]) -> Recipe:
    """One source of each metal, the usual one of those that are left, in smallest whole amounts.

    Raises ValueError when a metal has no source left.
    """
    atoms = atoms_of(target)
    precursors: dict[str, Fraction] = {}
    gases: dict[str, Fraction] = {}
    for metal in _metals(target):
        left = [name for name in _sources(metal) if name not in struck]
        if not left:
            raise ValueError(f"no source of {metal} is left")
        amount = Fraction(atoms[metal], atoms_of(left[0])[metal])
        precursors[left[0]] = amount
        if gas := PRECURSORS[left[0]].gas:
            gases[gas] = gases.get(gas, Fraction(0)) + amount
    amounts = [Fraction(1), *precursors.values(), *gases.values()]
    factor = Fraction(lcm(*(amount.denominator for amount in amounts)))
    factor /= gcd(*(int(amount * factor) for amount in amounts))
    kelvin = 50 * round(_MELTING_SHARE * mean_melting_point(precursors) / 50)
    scaled = (tuple((name, amount * factor) for name, amount in side.items()) for side in (precursors, gases))
    first, second = scaled
    return Recipe(first, factor, second, kelvin)
