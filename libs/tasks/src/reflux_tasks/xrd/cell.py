"""Turns any structure into the one setting that both line computation and refinement use: spglib's standard cell."""

from dataclasses import dataclass
from typing import Any

import numpy as np

SYMMETRY_PRECISION_ANGSTROM = 0.01
_SAME_SITE = 1e-3
"""Largest difference in fractional coordinates of one site."""


@dataclass(frozen=True)
class StandardCell:
    """A conventional cell (unique axis b, hexagonal axes) with its asymmetric unit.

    The Hall symbol fixes origin and axes, which a short Hermann-Mauguin symbol leaves open ("R -3 c" without ":H" is
    read as rhombohedral by ObjCryst, which then loses c).
    """

    structure: Any
    """pymatgen Structure of the whole cell."""
    hall: str
    space_group: int
    system: str
    species: tuple[str, ...]
    coords: np.ndarray
    """Fractional coordinates [atoms, 3] of the asymmetric unit, the order of `species`."""
    multiplicities: np.ndarray
    """Atoms in the cell [atoms] that symmetry makes of each."""
    from_given: np.ndarray
    """[3, 3]: x here = from_given @ x + shift, x the fractional coordinates of the structure as it was given."""


def standard_cell(structure: Any) -> StandardCell:
    """Standard cell of an ordered pymatgen Structure; raises ValueError when no symmetry is found or atoms coincide."""
    import spglib
    from pymatgen.core import Structure
    from pymatgen.symmetry.analyzer import SpacegroupAnalyzer

    analyzer = SpacegroupAnalyzer(structure, symprec=SYMMETRY_PRECISION_ANGSTROM)
    refined = analyzer.get_refined_structure()
    dataset = analyzer.get_symmetry_dataset()
    if dataset is None:
        raise ValueError(f"no symmetry found for {structure.composition.reduced_formula}")
    operations = spglib.get_symmetry_from_database(dataset.hall_number)
    setting = spglib.get_spacegroup_type(dataset.hall_number)
    assert operations is not None
    assert setting is not None
    symbols = [site.specie.symbol for site in refined]
    orbits = _orbits(refined.frac_coords, symbols, operations["rotations"], operations["translations"])
    whole = Structure(refined.lattice, symbols, refined.frac_coords)
    return StandardCell(
        structure=whole,
        hall=setting.hall_symbol,
        space_group=int(dataset.number),
        system=analyzer.get_crystal_system(),
        species=tuple(symbols[i] for i in orbits),
        coords=np.array(refined.frac_coords)[list(orbits)],
        multiplicities=np.array(list(orbits.values())),
        from_given=np.array(dataset.transformation_matrix),
    )


def _orbits(coords: np.ndarray, symbols: list[str], rotations: np.ndarray, shifts: np.ndarray) -> dict[int, int]:
    """Position of one atom per orbit -> size of the orbit; raises ValueError when atoms and operations do not fit."""
    covered = np.zeros(len(coords), bool)
    orbits: dict[int, int] = {}
    for i, coord in enumerate(coords):
        if covered[i]:
            continue
        images = rotations @ coord + shifts
        distance = images[:, None, :] - coords[None]
        same = (np.abs(distance - np.round(distance)) < _SAME_SITE).all(axis=2)
        hits = same.any(axis=0)
        if not same.any(axis=1).all() or any(symbols[j] != symbols[i] for j in np.flatnonzero(hits)):
            raise ValueError(f"symmetry operations do not fit the atoms around {symbols[i]} at {coord}")
        orbits[i] = int(hits.sum())
        covered |= hits
    return orbits
