"""The phases that answers may name, looked up by their words; loaded on first use."""

from functools import cached_property
from pathlib import Path

import numpy as np

from reflux_tasks.xrd.phases import Phase, load_phases
from reflux_tasks.xrd.refinement import Candidate


class PhaseDatabase:
    """All phases of the collection by label; one object per process and cache folder is enough."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def load(self) -> None:
        """Reads (or builds) the collection now instead of on first use."""
        _ = self.phases

    @cached_property
    def phases(self) -> dict[str, Phase]:
        """Phases by the text of their label, such as "Ti O n2 sg136"."""
        return {" ".join(phase.label): phase for phase in load_phases(self.cache_dir, None)}


def lengths(phase: Phase) -> np.ndarray:
    """Lengths [3] of the lattice vectors in angstrom."""
    return np.linalg.norm(phase.lattice, axis=1)


def candidate(
    phase: Phase, cell_scale: np.ndarray, *, name: str = "", march: tuple[int, int, int] | None = None
) -> Candidate:
    """The phase with stretched lattice vectors, as a refinement takes it, under its own or another name."""
    lattice, sides = phase.lattice, lengths(phase)
    cosines = [lattice[i] @ lattice[j] / sides[i] / sides[j] for i, j in ((1, 2), (0, 2), (0, 1))]
    stretched, angles = sides * np.asarray(cell_scale, float), np.degrees(np.arccos(cosines))
    a, b, c, alpha, beta, gamma = (float(value) for value in (*stretched, *angles))
    sites = tuple(
        (element, float(x), float(y), float(z), multiplicity)
        for element, (x, y, z), multiplicity in zip(phase.species, phase.coords, phase.multiplicities, strict=True)
    )
    return Candidate(name or phase.name, (a, b, c, alpha, beta, gamma), phase.hall, sites, march)
