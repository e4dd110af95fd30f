"""Bounds that a structure must keep before anything is computed with it.

Cells of 0.5 to 1000 A and 10 to 170 degrees: L. M. Antunes et al., CrystaLLM, Nat. Commun. 15, 10570 (2024). Distances
of 0.5 A and a volume of 0.1 A^3: T. Xie et al., CDVAE, ICLR 2022 (arXiv 2110.06197).
"""

import numpy as np

LENGTH_RANGE_ANGSTROM = (0.5, 1000.0)
ANGLE_RANGE_DEGREES = (10.0, 170.0)
MIN_VOLUME = 0.1
"""Of the cell, in cubic angstrom."""
MIN_DISTANCE_ANGSTROM = 0.5
MIN_VOLUME_PER_ATOM = 1.5
"""Cubic angstrom; half of what the densest known solids have at 200 GPa. Keeps neighbour lists small."""
MAX_ATOMS = 200
"""Of the conventional cell."""


def cell_problem(lengths: np.ndarray, angles: np.ndarray, volume: float, num_atoms: int) -> str:
    """What is wrong with a cell; empty when nothing is. Lengths in angstrom, angles in degrees."""
    if not (np.isfinite(lengths).all() and np.isfinite(angles).all() and np.isfinite(volume)):
        return "the cell is not finite"
    low, high = LENGTH_RANGE_ANGSTROM
    if (lengths < low).any() or (lengths > high).any():
        return f"cell length {lengths.min():g} or {lengths.max():g} A is outside {low:g} to {high:g}"
    low, high = ANGLE_RANGE_DEGREES
    if (angles < low).any() or (angles > high).any():
        return f"cell angle {angles.min():g} or {angles.max():g} degrees is outside {low:g} to {high:g}"
    if volume < MIN_VOLUME:
        return f"cell volume {volume:.3g} A^3 is below {MIN_VOLUME:g}"
    if volume < MIN_VOLUME_PER_ATOM * num_atoms:
        return f"volume per atom {volume / num_atoms:.3g} A^3 is below {MIN_VOLUME_PER_ATOM:g}"
    return ""


def structure_problem(structure: object) -> str:
    """What is wrong with an ordered pymatgen Structure; empty when nothing is."""
    from pymatgen.core import Structure

    assert isinstance(structure, Structure)
    if len(structure) > MAX_ATOMS:
        return f"{len(structure)} atoms in the cell, at most {MAX_ATOMS} are read"
    if not np.isfinite(structure.frac_coords).all():
        return "a coordinate is not finite"
    lattice = structure.lattice
    problem = cell_problem(np.array(lattice.abc), np.array(lattice.angles), lattice.volume, len(structure))
    if problem:
        return problem
    shortest = float(min(lattice.get_lll_reduced_lattice().abc))
    if len(structure) > 1:
        distances = lattice.get_all_distances(structure.frac_coords, structure.frac_coords)
        shortest = min(shortest, float(distances[np.triu_indices(len(structure), 1)].min()))
    if shortest < MIN_DISTANCE_ANGSTROM:
        return f"atoms {shortest:.2f} A apart, at least {MIN_DISTANCE_ANGSTROM:g} are needed"
    return ""
