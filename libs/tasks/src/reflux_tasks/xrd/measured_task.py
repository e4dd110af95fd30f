"""The task of a laboratory: name the phases of its own measured patterns and their mass fractions.

Its folder (`xrd-measured` in the cache folder of the stack) holds `patterns`, whose names say the weighed fractions
(`V2O5_0p6-ZnO_0p4--8min.xrdml`), and maybe `candidates` (CIF). A hash of the mixture holds a fifth of the mixtures out,
with all of their scans.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from reflux_tasks.canonical import END, SEPARATOR
from reflux_tasks.options import InvalidOption, parse_options
from reflux_tasks.streams import STREAMS, problem_generator
from reflux_tasks.task import Problem, Split, Task
from reflux_tasks.verify import Verifier
from reflux_tasks.xrd.measured import MeasuredVerifier
from reflux_tasks.xrd.measured_payload import measured_payload
from reflux_tasks.xrd.patterns import MAX_PEAKS
from reflux_tasks.xrd.profile import Profile, snip_background
from reflux_tasks.xrd.profile_surrogate import observed_peaks
from reflux_tasks.xrd.refinement import MAX_PHASES
from reflux_tasks.xrd.structure_files import SHIPPED, Structure, read_folder
from reflux_tasks.xrd.validation import Scan, find_scans
from reflux_tasks.xrd.vocabulary import ELEMENT_SLOTS, Vocabulary

HELDOUT_SHARE = 5
"""One mixture in five is held out, at least one."""
FRACTION_STEPS = 20
"""Mass fractions are words, a twentieth apart."""


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    """Options of the task."""

    folder: str = ""
    """Where `patterns` and `candidates` lie; empty takes `xrd-measured` in the cache folder."""
    max_distractors: int = 3
    """Largest number of elements in the prompt that are not in the sample."""
    heldout_seed: int = 0
    """Seed of the held-out problems; apart from the run's seed, so that runs are judged on equal problems."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_distractors < ELEMENT_SLOTS:
            raise InvalidOption("max_distractors", self.max_distractors, f"use 0 to {ELEMENT_SLOTS - 1}")
        if self.heldout_seed < 0:
            raise InvalidOption("heldout_seed", self.heldout_seed, "use 0 or more")


@dataclass(frozen=True)
class MeasuredProblem(Problem):
    """One scan with its truth."""

    scan: int
    """Position in the task's scans."""
    elements: tuple[str, ...]
    """Elements of the sample and the distractors, sorted."""
    thinned: Profile
    """Half to all of the counts, drawn at random: what the prompt shows. They are Poisson counts as the scan's are."""


class MeasuredVocabulary(Vocabulary):
    """Words of the candidates' names, their elements, angles and mass fractions."""

    def __init__(self, candidates: Mapping[str, Structure]) -> None:
        super().__init__([structure.phase for structure in candidates.values()])
        marks = [word for word in self.words if word.startswith("<")]
        self.fractions = tuple(f"{step / FRACTION_STEPS:.2f}" for step in range(1, FRACTION_STEPS + 1))
        words = [*marks, *self.angle_words, *self.elements, *sorted(candidates), *self.fractions]
        self.words = tuple(dict.fromkeys(words))  # a candidate may be called as its element is


class MeasuredTask(Task[MeasuredProblem]):
    """See the contract of Task; docs/science-xrd.md says how to bring patterns."""

    name: ClassVar[str] = "xrd-measured"
    max_answer_words: ClassVar[int] = 3 * MAX_PHASES

    def __init__(self, seed: int, cache_dir: Path, options: MeasuredOptions) -> None:
        if seed < 0:
            raise InvalidOption("seed", seed, "use 0 or more")
        self.seed = seed
        self.options = options
        self.folder = Path(options.folder) if options.folder else cache_dir / self.name

    @classmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        return cls(seed, cache_dir, parse_options(MeasuredOptions, options))

    @property
    def verifiers(self) -> Mapping[str, Verifier]:
        return {MeasuredVerifier.name: self._verifier}

    @cached_property
    def _verifier(self) -> MeasuredVerifier:
        return MeasuredVerifier(patterns=self.patterns_folder, warm=self.candidates_folder)

    @property
    def patterns_folder(self) -> Path:
        return self.folder / "patterns"

    @property
    def candidates_folder(self) -> Path:
        own = self.folder / "candidates"
        return own if own.is_dir() else SHIPPED

    @cached_property
    def candidates(self) -> dict[str, Structure]:
        found, _ = self._from_files(lambda: read_folder(self.candidates_folder))
        if bad := [name for name in found if name.split() != [name] or name in (SEPARATOR, END)]:
            raise InvalidOption("folder", str(self.folder), f"a candidate's name must be one word, rename {bad[0]!r}")
        return found

    @cached_property
    def scans(self) -> list[Scan]:
        """Scans whose names can be read, of mixtures whose elements fit the prompt."""
        found, _ = self._from_files(lambda: find_scans(self.patterns_folder, self.candidates, quick=False))
        return [scan for scan in found if len(self._elements(scan)) <= ELEMENT_SLOTS]

    def _from_files(self, read: Any) -> Any:
        try:
            return read()
        except (OSError, ValueError) as error:
            way_out = f"put scans such as V2O5_0p6-ZnO_0p4--8min.xrdml into {self.patterns_folder} ({error})"
            raise InvalidOption("folder", str(self.folder), way_out) from error

    @cached_property
    def parts(self) -> tuple[list[int], list[int]]:
        """Positions of the scans for training and of those held out: a hash of the mixture decides."""
        mixtures = sorted(
            {_mixture(scan) for scan in self.scans}, key=lambda text: hashlib.blake2b(text.encode()).digest()
        )
        if len(mixtures) < 2:
            raise InvalidOption("folder", str(self.folder), f"has {len(mixtures)} mixtures; two are the least")
        held = set(mixtures[: max(1, len(mixtures) // HELDOUT_SHARE)])
        groups: tuple[list[int], list[int]] = ([], [])
        for place, scan in enumerate(self.scans):
            groups[_mixture(scan) in held].append(place)
        return groups

    @cached_property
    def vocabulary(self) -> MeasuredVocabulary:
        return MeasuredVocabulary(self.candidates)

    @property
    def words(self) -> Sequence[str]:
        return self.vocabulary.words

    def problem(self, split: Split, index: int) -> MeasuredProblem:
        rng = problem_generator(split, index, self.seed, self.options.heldout_seed)
        places = self.parts[split == "heldout"]
        place = places[int(rng.integers(len(places)))]
        scan = self.scans[place]
        counts = rng.binomial(scan.coarse.counts.round().astype(np.int64), rng.uniform(0.5, 1.0))
        thinned = Profile(scan.coarse.two_theta, counts.astype(float))
        return MeasuredProblem(split, index, place, self._draw_elements(scan, rng), thinned)

    def _elements(self, scan: Scan) -> set[str]:
        return {element for name in scan.weighed for element in self.candidates[name].phase.elements}

    def _draw_elements(self, scan: Scan, rng: np.random.Generator) -> tuple[str, ...]:
        present = self._elements(scan)
        absent = [element for element in self.vocabulary.elements if element not in present]
        wanted = min(int(rng.integers(0, self.options.max_distractors + 1)), ELEMENT_SLOTS - len(present))
        return tuple(sorted(present | {absent[i] for i in rng.permutation(len(absent))[:wanted].tolist()}))

    def prompt_words(self, problem: MeasuredProblem) -> list[str]:
        angles, heights = observed_peaks(problem.thinned, snip_background(problem.thinned))
        strongest = np.argsort(-heights, kind="stable")[:MAX_PEAKS]
        return self.vocabulary.prompt(problem.elements, angles[strongest])

    def answer_words(self, problem: MeasuredProblem) -> list[str]:
        """Heaviest phase first; fractions rounded so that they add up to 1."""
        weighed = self.scans[problem.scan].weighed
        steps = dict(zip(weighed, rounded(list(weighed.values())), strict=True))
        parts = [
            [name, self.vocabulary.fractions[steps[name] - 1]]
            for name in sorted(weighed, key=lambda name: (-weighed[name], name))
        ]
        return [*(word for part in parts for word in (SEPARATOR, *part)), END][1:]

    def truth(self, problem: MeasuredProblem) -> dict[str, Any]:
        """Payload of the verifier: the whole scan, the candidates, the prompt's elements, the weighed fractions."""
        scan = self.scans[problem.scan]
        if problem.scan not in self._payloads:
            self._payloads[problem.scan] = measured_payload(scan.path, self.candidates_folder, weighed=scan.weighed)
        return {**self._payloads[problem.scan], "elements": list(problem.elements)}

    @cached_property
    def _payloads(self) -> dict[int, dict[str, Any]]:
        return {}

    def split_record(self) -> dict[str, Any]:
        train, held = ([self.scans[place].path.name for place in places] for places in self.parts)
        return {
            "task": self.name,
            "seed": self.seed,
            "options": {field.name: getattr(self.options, field.name) for field in fields(self.options)},
            "generator_streams": dict(STREAMS),
            "candidates": sorted(self.candidates),
            "training_scans": train,
            "heldout_scans": held,
        }

    def initial_embedding(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray]:
        return self.vocabulary.angle_embedding(hidden_size, seed)


def _mixture(scan: Scan) -> str:
    return "-".join(f"{name}_{fraction:.3f}" for name, fraction in sorted(scan.weighed.items()))


def rounded(fractions: Sequence[float]) -> list[int]:
    """Twentieths, at least one each, that add up to 20 (largest remainders); `fractions` add up to 1."""
    exact = np.array(fractions) * FRACTION_STEPS
    steps = np.maximum(np.floor(exact), 1).astype(int)
    while steps.sum() != FRACTION_STEPS:
        off = exact - steps
        place = (
            int(np.argmax(off)) if steps.sum() < FRACTION_STEPS else int(np.argmin(np.where(steps > 1, off, np.inf)))
        )
        steps[place] += 1 if steps.sum() < FRACTION_STEPS else -1
    return steps.tolist()
