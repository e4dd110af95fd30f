"""Canonical form of a crystal structure: one text for all of its cells, settings, origins and orders of atoms.

The text holds the whole structure on a grid, so `structure_from_key` gives it back. A verifier that grades *that*
structure, and not the one in the answer, gives equal grades to equal keys by construction, whatever the tolerances.
Needs pymatgen and spglib: runs in a child, never in a service.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

SYMMETRY_ANGSTROM = 1e-3
"""Atoms this close to a translated copy of the cell are taken as the copy (spglib's symprec)."""
LENGTH_STEP_ANGSTROM = 0.00097
"""No length of up to five decimals lies on the edge between two steps, where rounding noise would decide."""
STEPS = 4800
"""Steps of fractional coordinates and of cosines per unit. Special positions (k/24), the angles of centred lattices and
coordinates of up to six decimals lie inside a step, not on its edge."""
MAX_ATOMS = 200
_MAX_LENGTH_ANGSTROM = 1000.0
_EQUAL_ANGSTROM = 2e-3
"""Lattice vectors this close in length may take each other's place."""
_MIN_VOLUME_SHARE = 1e-3
"""Least volume over the product of the lengths; a flatter cell has no reliable reduced form."""


def structure_key(structure: Any) -> str:
    """Key of an ordered pymatgen Structure (or anything with `lattice.matrix`, `frac_coords` and `species`).

    Primitive cell (spglib) -> Niggli cell (I. Krivy, B. Gruber, Acta Cryst. A32, 297 (1976), spglib's niggli_reduce) ->
    of all right-handed bases with the same three lengths and all origins on an atom of the rarest element, the one
    whose grid values come first. Mirror images have different keys. Two structures share a key only when lengths agree
    within 0.00097 A, cosines and fractional coordinates within 1/4800. Raises ValueError for a structure that has no
    reliable key: partial occupancies, no or more than 200 atoms in the primitive cell, a flat or huge cell, NaN.
    """
    cell = _primitive(_checked(structure))
    bases = _equal_bases(cell.lattice)
    grams = np.array([_metric(basis @ cell.lattice) for basis in bases])
    first = min(map(tuple, grams))
    rows = min(_rows(cell, basis) for basis, gram in zip(bases, grams, strict=True) if tuple(gram) == first)
    atoms = ";".join(f"{element}:{x},{y},{z}" for element, x, y, z in rows)
    return f"{','.join(map(str, first))};{atoms}"


def structure_from_key(key: str) -> Any:
    """The pymatgen Structure that a key stands for. Raises ValueError for a text that is no key."""
    from pymatgen.core import Lattice, Structure

    metric, *atoms = key.split(";")
    numbers = [int(part) for part in metric.split(",")]
    if len(numbers) != 6 or not atoms:
        raise ValueError("not a key of a structure")
    lengths = [number * LENGTH_STEP_ANGSTROM for number in numbers[:3]]
    angles = np.degrees(np.arccos(np.array(numbers[3:]) / STEPS))
    species, coords = [], []
    for atom in atoms:
        element, _, position = atom.partition(":")
        species.append(element)
        coords.append([int(part) / STEPS for part in position.split(",")])
    return Structure(Lattice.from_parameters(*lengths, *angles), species, coords)


@dataclass(frozen=True)
class _Cell:
    lattice: np.ndarray
    """Rows are the vectors [3, 3] in angstrom, right-handed."""
    coords: np.ndarray
    """Fractional [atoms, 3]."""
    elements: tuple[str, ...]


def _checked(structure: Any) -> _Cell:
    if not structure.is_ordered:
        raise ValueError("a structure with partial occupancies has no key")
    lattice, coords = np.array(structure.lattice.matrix, float), np.array(structure.frac_coords, float)
    elements = tuple(str(getattr(species, "element", species)) for species in structure.species)
    if not elements or len(elements) > 8 * MAX_ATOMS:
        raise ValueError(f"a cell of {len(elements)} atoms has no key")
    if not (np.isfinite(lattice).all() and np.isfinite(coords).all() and np.abs(coords).max() < 1e6):
        raise ValueError("lattice or coordinates are not finite")
    return _Cell(_checked_lattice(lattice), coords, elements)


def _checked_lattice(lattice: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(lattice, axis=1)
    flat = abs(np.linalg.det(lattice)) < _MIN_VOLUME_SHARE * np.prod(lengths)
    if flat or lengths.max() > _MAX_LENGTH_ANGSTROM:
        raise ValueError("the cell is flat, or longer than 1000 A")
    return lattice


def _primitive(cell: _Cell) -> _Cell:
    import spglib

    names = sorted(set(cell.elements))
    numbers = [names.index(element) + 1 for element in cell.elements]
    given: Any = (cell.lattice, cell.coords, numbers)
    found: Any = spglib.standardize_cell(given, to_primitive=True, no_idealize=True, symprec=SYMMETRY_ANGSTROM)
    if found is None:
        raise ValueError("spglib finds no primitive cell: atoms overlap, or the cell is degenerate")
    lattice, coords, types = found
    if len(types) > MAX_ATOMS:
        raise ValueError(f"a primitive cell of {len(types)} atoms has no key; at most {MAX_ATOMS}")
    reduced = spglib.niggli_reduce(lattice, eps=1e-5)
    if reduced is None:
        raise ValueError("spglib finds no Niggli cell")
    coords = coords @ lattice @ np.linalg.inv(reduced)
    if np.linalg.det(reduced) < 0:
        reduced, coords = -reduced, -coords
    return _Cell(_checked_lattice(reduced), coords, tuple(names[kind - 1] for kind in types))


@cache
def _unimodular() -> np.ndarray:
    """All integer matrices [count, 3, 3] with entries -1, 0, 1 and determinant 1; rows combine lattice vectors."""
    vectors = np.array([v for v in product((-1, 0, 1), repeat=3) if any(v)])
    triples = vectors[np.array(list(product(range(len(vectors)), repeat=3)))]
    determinants = np.einsum("ni,ni->n", triples[:, 0], np.cross(triples[:, 1], triples[:, 2]))
    return triples[determinants == 1]


def _equal_bases(lattice: np.ndarray) -> np.ndarray:
    """Right-handed bases whose lengths are those of the reduced lattice, in rising order."""
    bases = _unimodular()
    lengths = np.linalg.norm(bases @ lattice, axis=2)
    wanted = np.sort(np.linalg.norm(lattice, axis=1))
    return bases[(np.abs(lengths - wanted) < _EQUAL_ANGSTROM).all(axis=1)]


def _metric(lattice: np.ndarray) -> tuple[int, ...]:
    """Grid values of the lengths a, b, c and of the cosines of alpha, beta, gamma."""
    lengths = np.linalg.norm(lattice, axis=1)
    a, b, c = lattice / lengths[:, None]
    cosines = np.rint(np.array([b @ c, a @ c, a @ b]) * STEPS)
    return (*np.rint(lengths / LENGTH_STEP_ANGSTROM).astype(int).tolist(), *cosines.astype(int).tolist())


def _rows(cell: _Cell, basis: np.ndarray) -> tuple[tuple[str, int, int, int], ...]:
    """Atoms on the grid, sorted, with the origin on that atom of the rarest element that makes them come first."""
    coords = cell.coords @ np.linalg.inv(basis)
    counts = Counter(cell.elements)
    names = sorted(counts)
    rarest = min(names, key=lambda name: (counts[name], name))
    origins = coords[[element == rarest for element in cell.elements]]
    grid = np.rint((coords[None] - origins[:, None]) * STEPS).astype(np.int64) % STEPS
    kinds = np.array([names.index(element) for element in cell.elements])
    codes = ((kinds[None] * STEPS + grid[..., 0]) * STEPS + grid[..., 1]) * STEPS + grid[..., 2]
    codes.sort(axis=1)
    best = min(codes.tolist())
    return tuple(
        (names[code // STEPS**3], code // STEPS**2 % STEPS, code // STEPS % STEPS, code % STEPS) for code in best
    )
