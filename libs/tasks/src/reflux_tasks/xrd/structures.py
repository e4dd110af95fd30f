"""Candidate structures of the measured mixtures: published crystal data, and reference CIFs of the data folder.

Sources of the published ones, parameters rounded:
    ZnO    S. C. Abrahams, J. L. Bernstein, Acta Cryst. B 25, 1233 (1969)
    NiO    powder diffraction file 47-1049; rock salt
    In2O3  M. Marezio, Acta Cryst. 20, 723 (1966)
    V2O5   R. Enjalbert, J. Galy, Acta Cryst. C 42, 1467 (1986)
    MnCO3  H. Effenberger, K. Mereiter, J. Zemann, Z. Kristallogr. 156, 233 (1981)
    Bi2O3  H. A. Harwig, Z. Anorg. Allg. Chem. 444, 151 (1978)
    TiO2   cells of C. J. Howard, T. M. Sabine, F. Dickson, Acta Cryst. B 47, 462 (1991); coordinates of the CIFs
The CIFs (La(OH)3, Li2CO3, ZrO2, TiO2) come with XRD-AutoAnalyzer (njszym/XRD-AutoAnalyzer, MIT).
"""

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.xrd.cell import standard_cell
from reflux_tasks.xrd.refinement import Candidate

REFERENCE_CIFS = {
    "TiO2": "TiO2_141.cif",
    "TiO2-rutile": "TiO2_136.cif",
    "ZrO2": "ZrO2_14.cif",
    "ZrO2-tetragonal": "ZrO2_137.cif",
    "La(OH)3": "La(OH)3_176.cif",
    "Li2CO3": "Li2CO3_15.cif",
}
"""Names without a suffix are what the file names of the mixtures mean: TiO2 is anatase, ZrO2 is monoclinic."""
MARCH_AXES = {"V2O5": (0, 0, 1)}
"""V2O5 lies in plates; other phases gain nothing from a texture parameter."""
_CELLS = {"TiO2": (3.7845, 9.5143), "TiO2-rutile": (4.5937, 2.9587)}


def candidates(data_dir: Path, wanted: set[str] | None = None) -> dict[str, Candidate]:
    """Candidate structures by name: all known ones, and of `wanted` also those with exactly one CIF in `references`.

    Structures whose CIF is not there are left out.
    """
    makers: dict[str, Callable[[], Any]] = dict(_PUBLISHED)
    folder = data_dir / "references"
    for name, file_name in REFERENCE_CIFS.items():
        if (folder / file_name).is_file():
            makers[name] = lambda name=name, path=folder / file_name: _reference(path, _CELLS.get(name))
    for name in sorted((wanted or set()) - set(makers)):
        found = sorted(folder.glob(f"{name}_*.cif"))
        if len(found) == 1:
            makers[name] = lambda path=found[0]: _reference(path, None)
    return {name: structure_candidate(name, make()) for name, make in makers.items()}


def structure_candidate(name: str, structure: Any) -> Candidate:
    """A pymatgen Structure (ordered) as a candidate in its standard cell."""
    cell = standard_cell(structure)
    sites = tuple(
        (element, float(x), float(y), float(z), int(multiplicity))
        for element, (x, y, z), multiplicity in zip(cell.species, cell.coords, cell.multiplicities, strict=True)
    )
    a, b, c, alpha, beta, gamma = (float(value) for value in cell.structure.lattice.parameters)
    return Candidate(name, (a, b, c, alpha, beta, gamma), cell.hall, sites, MARCH_AXES.get(name))


def _reference(path: Path, tetragonal_cell: tuple[float, float] | None) -> Any:
    from pymatgen.core import Lattice, Structure

    with warnings.catch_warnings():  # files of the database round thirds to four digits; pymatgen says so each time
        warnings.simplefilter("ignore", UserWarning)
        structure = Structure.from_file(str(path))
    structure.remove_oxidation_states()
    if tetragonal_cell is None:
        return structure
    return Structure(Lattice.tetragonal(*tetragonal_cell), structure.species, structure.frac_coords)


def _from_space_group(symbol: str, lattice: tuple[str, tuple[float, ...]], atoms: dict[str, list[list[float]]]) -> Any:
    from pymatgen.core import Lattice, Structure

    species = [element for element, sites in atoms.items() for _ in sites]
    coords = [site for sites in atoms.values() for site in sites]
    return Structure.from_spacegroup(symbol, getattr(Lattice, lattice[0])(*lattice[1]), species, coords)


def _v2o5() -> Any:
    """Pmmn in origin choice 2, written out because the short symbol leaves the origin open."""
    from pymatgen.core import Lattice, Structure

    atoms = [
        ("V", 0.10118, -0.1083),
        ("O", 0.1043, -0.469),
        ("O", -0.0689, 0.003),
        ("O", 0.25, 0.001),
    ]
    species, coords = [], []
    for (element, x, z), (mirror, half) in product(atoms, product((False, True), repeat=2)):
        site = np.array([0.5 - x if mirror else x, 0.25, z]) * (-1 if half else 1) % 1.0
        if not any(np.allclose(site, other, atol=1e-4) for other in coords):
            species.append(element)
            coords.append(site)
    return Structure(Lattice.orthorhombic(11.512, 3.564, 4.368), species, coords)


_THIRD = 1 / 3
_PUBLISHED: dict[str, Callable[[], Any]] = {
    "ZnO": lambda: _from_space_group(
        "P6_3mc",
        ("hexagonal", (3.2498, 5.2066)),
        {"Zn": [[_THIRD, 2 * _THIRD, 0]], "O": [[_THIRD, 2 * _THIRD, 0.3821]]},
    ),
    "NiO": lambda: _from_space_group("Fm-3m", ("cubic", (4.1771,)), {"Ni": [[0, 0, 0]], "O": [[0.5, 0.5, 0.5]]}),
    "In2O3": lambda: _from_space_group(
        "Ia-3",
        ("cubic", (10.117,)),
        {"In": [[0.25, 0.25, 0.25], [0.4662, 0, 0.25]], "O": [[0.3905, 0.1529, 0.3832]]},
    ),
    "V2O5": _v2o5,
    "MnCO3": lambda: _from_space_group(
        "R-3c", ("hexagonal", (4.773, 15.642)), {"Mn": [[0, 0, 0]], "C": [[0, 0, 0.25]], "O": [[0.2695, 0, 0.25]]}
    ),
    "Bi2O3": lambda: _from_space_group(
        "P2_1/c",
        ("monoclinic", (5.8496, 8.1648, 7.5101, 112.98)),
        {
            "Bi": [[0.5242, 0.1843, 0.3613], [0.0409, 0.0425, 0.7762]],
            "O": [[0.780, 0.300, 0.710], [0.242, 0.044, 0.134], [0.271, 0.024, 0.513]],
        },
    ),
}
