"""Crystal structure prediction: from a composition, write a structure in its space group."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from reflux_tasks.chemistry.subset import small_parts
from reflux_tasks.csp.full import FullRelaxVerifier, FullVerifier, RelaxedVerifier
from reflux_tasks.csp.references import Reference, energies, load_references
from reflux_tasks.csp.rule import RuleVerifier
from reflux_tasks.csp.surrogate import SurrogateVerifier
from reflux_tasks.csp.vocabulary import Vocabulary
from reflux_tasks.options import InvalidOption, parse_options
from reflux_tasks.streams import STREAMS, problem_generator
from reflux_tasks.task import Problem, Split, Task
from reflux_tasks.verify import Verifier

HELDOUT_SHARE = 5
"""One composition in five is held out, with all of its polymorphs."""


@dataclass(frozen=True, kw_only=True)
class CspOptions:
    """Options of the task."""

    space_group_shown: bool = False
    """The prompt names the space group, and only polymorphs in it count."""
    num_phases: int = 0
    """Structures to train on, a fixed random choice, and a quarter as many held-out ones; 0 takes all. 8 is easy."""
    heldout_seed: int = 0
    """Seed of the held-out problems; apart from the run's seed, so that runs are judged on equal problems."""

    def __post_init__(self) -> None:
        if self.num_phases < 0:
            raise InvalidOption("num_phases", self.num_phases, "use 1 or more, or 0 for all")
        if self.heldout_seed < 0:
            raise InvalidOption("heldout_seed", self.heldout_seed, "use 0 or more")


@dataclass(frozen=True)
class CspProblem(Problem):
    """One composition."""

    reference: int
    """Position in the task's references of the structure that the warm-up answer writes."""


class CspTask(Task[CspProblem]):
    """See the contract of Task; rewards, tolerances and sources are in docs/science-csp.md."""

    name: ClassVar[str] = "crystal-structure"
    max_answer_words: ClassVar[int] = 40

    def __init__(self, seed: int, cache_dir: Path, options: CspOptions) -> None:
        if seed < 0:
            raise InvalidOption("seed", seed, "use 0 or more")
        self.seed = seed
        self.cache_dir = cache_dir
        self.options = options

    @classmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        return cls(seed, cache_dir, parse_options(CspOptions, options))

    @cached_property
    def references(self) -> list[Reference]:
        return load_references(self.cache_dir)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.references)

    @property
    def words(self) -> Sequence[str]:
        return self.vocabulary.words

    @cached_property
    def verifiers(self) -> Mapping[str, Verifier]:
        verifiers = (RuleVerifier(), SurrogateVerifier(), RelaxedVerifier(), FullVerifier(), FullRelaxVerifier())
        return {verifier.name: verifier for verifier in verifiers}

    @cached_property
    def parts(self) -> tuple[list[int], list[int]]:
        """Positions of the references for training and of those held out: a hash of the composition decides."""
        groups: tuple[list[int], list[int]] = ([], [])
        for place, reference in enumerate(self.references):
            key = composition_key(reference.amounts).encode()
            held_out = hashlib.blake2b(key, digest_size=4).digest()[0] % HELDOUT_SHARE == 0
            groups[held_out].append(place)
        return small_parts(groups, self.options.num_phases)

    def problem(self, split: Split, index: int) -> CspProblem:
        rng = problem_generator(split, index, self.seed, self.options.heldout_seed)
        places = self.parts[split == "heldout"]
        return CspProblem(split, index, places[int(rng.integers(len(places)))])

    def prompt_words(self, problem: CspProblem) -> list[str]:
        reference = self.references[problem.reference]
        group = reference.phase.space_group if self.options.space_group_shown else None
        return self.vocabulary.prompt(reference.amounts, group)

    def answer_words(self, problem: CspProblem) -> list[str]:
        return self.vocabulary.answer(self.references[problem.reference])

    def truth(self, problem: CspProblem) -> dict[str, Any]:
        """Payload of the verifiers: composition and known structures; equal for equal prompts."""
        asked = self.references[problem.reference]
        return {"amounts": asked.amounts, "known": [self._row(place) for place in self._answers_to(asked)]}

    def _answers_to(self, asked: Reference) -> list[int]:
        same = self._by_composition[composition_key(asked.amounts)]
        if not self.options.space_group_shown:
            return same
        return [place for place in same if self.references[place].phase.space_group == asked.phase.space_group]

    @cached_property
    def _by_composition(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place, reference in enumerate(self.references):
            found.setdefault(composition_key(reference.amounts), []).append(place)
        return found

    def _row(self, place: int) -> dict[str, Any]:
        if place not in self._rows:
            reference = self.references[place]
            structure = reference.structure()
            self._rows[place] = {
                "name": reference.name,
                "space_group": reference.phase.space_group,
                "energy": energies()[reference.name].energy,
                "lattice": np.round(structure.lattice.matrix, 6).tolist(),
                "species": [site.specie.symbol for site in structure],
                "coords": np.round(structure.frac_coords, 6).tolist(),
            }
        return self._rows[place]

    @cached_property
    def _rows(self) -> dict[int, dict[str, Any]]:
        return {}

    def split_record(self) -> dict[str, Any]:
        held = {composition_key(self.references[place].amounts) for place in self.parts[1]}
        return {
            "task": self.name,
            "seed": self.seed,
            "options": {field.name: getattr(self.options, field.name) for field in fields(self.options)},
            "generator_streams": dict(STREAMS),
            "references": [reference.name for reference in self.references],
            "heldout_compositions": sorted(held),
        }

    def initial_embedding(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray]:
        return self.vocabulary.number_rows(hidden_size, seed)


def composition_key(amounts: Mapping[str, int]) -> str:
    """Reduced formula with sorted elements, equal for all polymorphs."""
    return "".join(f"{element}{amounts[element]}" for element in sorted(amounts))
