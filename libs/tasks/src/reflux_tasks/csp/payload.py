"""What the verifiers are told about a problem, and what they make of an answer to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reflux_tasks import progress
from reflux_tasks.canonical_structure import structure_from_key, structure_key
from reflux_tasks.csp.answers import expand, parse_answer
from reflux_tasks.verify import Answer, Grade
from reflux_tasks.wording import InvalidAnswer

MATCH_LTOL, MATCH_STOL, MATCH_ANGLE_DEGREES = 0.3, 0.5, 10.0
"""Tolerances of StructureMatcher in the benchmarks of CDVAE, DiffCSP and CrystaLLM."""
GEOMETRY_ANGSTROM = 0.1
"""spglib's tolerance for the symmetry of answers, whose numbers are rounded."""


@dataclass(frozen=True)
class KnownStructure:
    """One polymorph of the wanted composition."""

    name: str
    space_group: int
    energy: float
    """CHGNet after relaxation, eV per atom."""
    structure: Any
    """Primitive pymatgen Structure."""

    @cached_property
    def symmetry(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """As `symmetry_of` sees it; at its tolerance a few structures are more symmetric than `space_group`."""
        return symmetry_of(self.structure)


@dataclass(frozen=True)
class Truth:
    """The wanted composition and its known structures."""

    amounts: dict[str, int]
    known: tuple[KnownStructure, ...]

    @property
    def ground_energy(self) -> float:
        """Energy of the lowest known polymorph, eV per atom."""
        return min(structure.energy for structure in self.known)

    @property
    def ground(self) -> KnownStructure:
        return min(self.known, key=lambda structure: structure.energy)


@dataclass(frozen=True)
class Proposal:
    """An answer that is a possible structure of the wanted composition."""

    structure: Any
    """pymatgen Structure; the one that the key stands for, where there is a key."""
    key: str
    """Canonical text; empty when the structure has none."""


def parse_truth(payload: Mapping[str, Any]) -> Truth:
    """Raises ValueError for anything that is not a payload of this task."""
    try:
        amounts = {str(element): int(count) for element, count in payload["amounts"].items()}
        known = tuple(_known(row) for row in payload["known"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a payload of this task: {error!r}") from error
    if not amounts or not known:
        raise ValueError("not a payload of this task: no composition or no known structure")
    return Truth(amounts, known)


def _known(row: Mapping[str, Any]) -> KnownStructure:
    from pymatgen.core import Lattice, Structure

    structure = Structure(Lattice(np.array(row["lattice"], float)), row["species"], np.array(row["coords"], float))
    return KnownStructure(str(row["name"]), int(row["space_group"]), float(row["energy"]), structure)


def propose(answer: Answer) -> tuple[dict[str, int], Proposal]:
    """Composition and structure of an answer; raises InvalidAnswer."""
    crystal = parse_answer(answer)
    structure = expand(crystal)
    try:
        key = structure_key(structure)
        return crystal.amounts, Proposal(structure_from_key(key), key)
    except ValueError:  # a cell too flat or too large to be rewritten: graded as it is, and not shared
        return crystal.amounts, Proposal(structure.get_primitive_structure(), "")


def canonical_text(answer: Answer) -> str | None:
    """The key of the proposed structure: equal for all cells, settings and orders of one crystal."""
    try:
        return propose(answer)[1].key or None
    except InvalidAnswer:
        return None


def grade_proposals(truth: Truth, answers: Sequence[Answer], score: Callable[[Proposal], Grade]) -> list[Grade]:
    """Grades what parses; equal structures once. A composition other than the wanted one scores 0."""
    done: dict[str, Grade] = {}
    grades: list[Grade] = []
    for answer in progress.tracked(answers):
        try:
            amounts, proposal = propose(answer)
        except InvalidAnswer as error:
            grades.append(Grade("invalid", 0.0, {"reason": str(error), "exact": 0, "r_match": 0}))
            continue
        if amounts != truth.amounts:
            grades.append(Grade("scored", 0.0, {"gate": "another composition", "exact": 0, "r_match": 0}))
            continue
        if proposal.key not in done or not proposal.key:
            done[proposal.key] = score(proposal)
        grades.append(done[proposal.key])
    return grades


def symmetry_of(structure: Any) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Space group, and element and size of the orbits of the primitive cell; group 0 when spglib finds none."""
    import spglib

    names = sorted({site.specie.symbol for site in structure})
    numbers = [names.index(site.specie.symbol) + 1 for site in structure]
    cell: Any = (structure.lattice.matrix, structure.frac_coords, numbers)
    primitive: Any = spglib.find_primitive(cell, symprec=GEOMETRY_ANGSTROM)
    found: Any = spglib.get_symmetry_dataset(primitive, symprec=GEOMETRY_ANGSTROM) if primitive else None
    if found is None:
        return 0, ()
    orbits = np.unique(found.equivalent_atoms, return_counts=True)
    sizes = [(names[primitive[2][atom] - 1], int(count)) for atom, count in zip(*orbits, strict=True)]
    return int(found.number), tuple(sorted(sizes))


def match(truth: Truth, structure: Any) -> tuple[str, float] | None:
    """Name and normalised rms distance of the closest known structure that StructureMatcher accepts, else None."""
    from pymatgen.analysis.structure_matcher import StructureMatcher

    matcher = StructureMatcher(ltol=MATCH_LTOL, stol=MATCH_STOL, angle_tol=MATCH_ANGLE_DEGREES)
    found = []
    for known in truth.known:
        distances = matcher.get_rms_dist(known.structure, structure)
        if distances is not None:
            found.append((float(distances[0]), known.name))
    return (min(found)[1], min(found)[0]) if found else None
