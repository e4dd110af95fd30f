"""Space groups as numbers: operations, free cell parameters, and orbits of sites on or near special positions.

Setting of group N: the first one of spglib's database (unique axis b, cell choice 1, hexagonal axes, origin choice 1),
which is also the one that spglib standardises to.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CELL_PARAMETERS = {
    "triclinic": ("a", "b", "c", "alpha", "beta", "gamma"),
    "monoclinic": ("a", "b", "c", "beta"),
    "orthorhombic": ("a", "b", "c"),
    "tetragonal": ("a", "c"),
    "hexagonal": ("a", "c"),
    "cubic": ("a",),
}
"""Cell parameters that symmetry leaves free; trigonal groups are on hexagonal axes."""
SAME_SITE_ANGSTROM = 0.5
"""Images of a site closer than this are one atom on a special position (min_distance_sym_equiv of cctbx; R. W.
Grosse-Kunstleve, P. D. Adams, Acta Cryst. A 58, 60 (2002)); also the least distance of two atoms."""
_LAST_GROUP = ((2, "triclinic"), (15, "monoclinic"), (74, "orthorhombic"), (142, "tetragonal"), (194, "hexagonal"))
_ROUNDS = 8


@dataclass(frozen=True)
class Operations:
    """Symmetry operations x -> rotation @ x + shift in fractional coordinates."""

    rotations: np.ndarray
    """[operations, 3, 3]"""
    shifts: np.ndarray
    """[operations, 3]"""


def crystal_system(space_group: int) -> str:
    """Key of `CELL_PARAMETERS`."""
    return next((system for last, system in _LAST_GROUP if space_group <= last), "cubic")


@functools.lru_cache(maxsize=1)
def _first_settings() -> dict[int, int]:
    import spglib

    first: dict[int, int] = {}
    for hall in range(1, 531):
        setting = spglib.get_spacegroup_type(hall)
        assert setting is not None, "the database has 530 settings"
        first.setdefault(setting.number, hall)
    return first


@functools.lru_cache(maxsize=256)
def operations(space_group: int) -> Operations:
    """Operations of group 1 to 230 in its first setting."""
    import spglib

    found = spglib.get_symmetry_from_database(_first_settings()[space_group])
    assert found is not None, "a number of the database"
    return Operations(np.asarray(found["rotations"], float), np.asarray(found["translations"], float))


def cell_vectors(space_group: int, parameters: Sequence[float]) -> np.ndarray:
    """Lattice vectors [3, 3] in angstrom, one per row, from the free parameters (angstrom, degrees) of the group.

    Raises ValueError when three angles do not make a cell.
    """
    system = crystal_system(space_group)
    given = dict(zip(CELL_PARAMETERS[system], parameters, strict=True))
    a = given["a"]
    b, c = given.get("b", a), given.get("c", a)
    degrees = (given.get("alpha", 90.0), given.get("beta", 90.0), given.get("gamma", 90.0))
    if system == "hexagonal":
        degrees = (90.0, 90.0, 120.0)
    cos_alpha, cos_beta, cos_gamma = (0.0 if angle == 90 else math.cos(math.radians(angle)) for angle in degrees)
    sin_gamma = math.sqrt(1 - cos_gamma**2)
    if sin_gamma < 1e-6:
        raise ValueError(f"gamma = {degrees[2]:g} makes no cell")
    along = (cos_alpha - cos_beta * cos_gamma) / sin_gamma
    height = 1 - cos_beta**2 - along**2
    if height <= 0:
        raise ValueError(f"the angles {', '.join(f'{angle:g}' for angle in degrees)} make no cell")
    return np.array(
        [
            [a, 0.0, 0.0],
            [b * cos_gamma, b * sin_gamma, 0.0],
            [c * cos_beta, c * along, c * math.sqrt(height)],
        ]
    )


def special_position(coords: np.ndarray, lattice: np.ndarray, space_group: int) -> np.ndarray:
    """The site moved onto the special position that it is close to: the mean over its images within 0.5 A.

    `coords` [3] fractional. Coordinates of an answer are rounded, so that "x, 2x" is rarely exact.
    """
    found = operations(space_group)
    site = np.asarray(coords, float)
    for _ in range(_ROUNDS):
        images = found.rotations @ site + found.shifts
        offset = images - site
        offset -= np.round(offset)
        near = np.linalg.norm(offset @ lattice, axis=1) < SAME_SITE_ANGSTROM
        shift = offset[near].mean(axis=0)
        site = site + shift
        if np.abs(shift).max() < 1e-12:
            break
    return site % 1.0


def orbit(coords: np.ndarray, lattice: np.ndarray, space_group: int) -> np.ndarray:
    """Fractional coordinates [atoms, 3] of all atoms that the group makes of one site, moved onto its position."""
    site = special_position(coords, lattice, space_group)
    found = operations(space_group)
    images = (found.rotations @ site + found.shifts) % 1.0
    chosen: list[np.ndarray] = []
    for image in images:
        if chosen:
            offset = np.array(chosen) - image
            offset -= np.round(offset)
            if (np.linalg.norm(offset @ lattice, axis=1) < SAME_SITE_ANGSTROM).any():
                continue
        chosen.append(image)
    return np.array(chosen)
