"""The known structures of the task: ordered AFLOW prototypes with few sites, and their energies after relaxation.

Source of the structures: reflux_tasks.xrd.phases (AFLOW prototypes of pymatgen, to be cited). The energies in
energies.json are CHGNet's, made by `python -m reflux_tasks.csp.references CACHE_FOLDER`.
"""

import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.chemistry.energies import PhaseEnergy, read_table, write_table
from reflux_tasks.chemistry.symmetry import CELL_PARAMETERS, crystal_system, orbit
from reflux_tasks.xrd.phases import Phase, load_phases

TABLE = Path(__file__).with_name("energies.json")
SOURCE = (
    "AFLOW prototypes as shipped by pymatgen (MIT), M. J. Mehl et al., Comput. Mater. Sci. 136, S1 (2017), "
    "D. Hicks et al., 161, S1 (2019), 199, 110450 (2021)"
)
MAX_SITES = 5
MAX_PRIMITIVE_ATOMS = 16
MAX_RELAXATION_GAIN = 0.25
"""eV per atom; a structure that gains more is written down wrongly, belongs to a high pressure, or is beyond CHGNet."""
_CENTRING = {"P": 1, "A": 2, "C": 2, "I": 2, "F": 4, "R": 3}


@dataclass(frozen=True)
class Reference:
    """One experimental structure in its conventional cell."""

    phase: Phase

    @property
    def name(self) -> str:
        return self.phase.name

    @cached_property
    def amounts(self) -> dict[str, int]:
        """Atoms per formula unit by element, in the order of the label."""
        counts: Counter[str] = Counter()
        for element, multiplicity in zip(self.phase.species, self.phase.multiplicities, strict=True):
            counts[element] += multiplicity
        divisor = math.gcd(*counts.values())
        return {word: counts[word] // divisor for word in self.phase.label if word in counts}

    @cached_property
    def cell_parameters(self) -> list[float]:
        """Free cell parameters of the space group, angstrom and degrees."""
        a, b, c = np.linalg.norm(self.phase.lattice, axis=1)
        first, second, third = self.phase.lattice
        angles = [
            math.degrees(math.acos(u @ v / np.linalg.norm(u) / np.linalg.norm(v)))
            for u, v in ((second, third), (first, third), (first, second))
        ]
        named = dict(zip(("a", "b", "c", "alpha", "beta", "gamma"), [a, b, c, *angles], strict=True))
        return [float(named[key]) for key in CELL_PARAMETERS[crystal_system(self.phase.space_group)]]

    @property
    def primitive_atoms(self) -> int:
        """Atoms of the primitive cell."""
        return sum(self.phase.multiplicities) // _CENTRING[self.phase.hall.lstrip("-")[0]]

    def structure(self) -> Any:
        """Primitive pymatgen Structure."""
        return self.conventional().get_primitive_structure()

    def conventional(self) -> Any:
        """pymatgen Structure of the conventional cell."""
        from pymatgen.core import Lattice, Structure

        species, coords = [], []
        for element, site in zip(self.phase.species, self.phase.coords, strict=True):
            atoms = orbit(site, self.phase.lattice, self.phase.space_group)
            species += [element] * len(atoms)
            coords.append(atoms)
        return Structure(Lattice(self.phase.lattice), species, np.concatenate(coords))


def load_references(cache_dir: Path) -> list[Reference]:
    """Structures with at most 5 sites and 16 atoms that are near a minimum of the potential, sorted by name."""
    return sorted((found for found in _small(cache_dir) if _near_minimum(found.name)), key=lambda found: found.name)


def _near_minimum(name: str) -> bool:
    energy = energies().get(name)
    return energy is not None and energy.start_energy - energy.energy <= MAX_RELAXATION_GAIN


@functools.lru_cache(maxsize=1)
def energies() -> dict[str, PhaseEnergy]:
    """The shipped energies by name of the reference."""
    return read_table(TABLE)


def _small(cache_dir: Path) -> Iterator[Reference]:
    for phase in load_phases(cache_dir, None):
        reference = Reference(phase)
        if len(phase.species) <= MAX_SITES and reference.primitive_atoms <= MAX_PRIMITIVE_ATOMS:
            yield reference


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    small = sorted(_small(Path(sys.argv[1])), key=lambda found: found.name)
    write_table(TABLE, SOURCE, ((found.name, found.structure()) for found in small))
