"""Starting structures of the precursors and targets: prototype and published cell; CHGNet relaxes them before use.

Cells (angstrom, rounded) and prototype parameters: R. W. G. Wyckoff, Crystal Structures (1963-1968), for simple oxides
and carbonates; R. J. Hill, J. R. Craig, G. V. Gibbs, Phys. Chem. Miner. 4, 317 (1979), for spinels; F. S. Galasso,
Structure and Properties of Inorganic Solids (1970), for perovskites and layered titanates; J. R. Smyth, R. M. Hazen,
Am. Mineral. 58, 588 (1973), for olivine; J. P. R. de Villiers, Am. Mineral. 56, 758 (1971), for aragonite. The rest are
AFLOW prototypes (reflux_tasks.xrd.phases), some with other elements and cells put in. Real crystals with tilted
octahedra or inverse spinels may lie some 10 meV per atom below what these ordered, idealised cells relax to.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reflux_tasks.chemistry.symmetry import orbit
from reflux_tasks.csp.references import Reference

Atoms = Sequence[tuple[str, Sequence[float]]]
_THIRD = 1 / 3


def _group(number: int, lattice: Any, atoms: Atoms) -> Any:
    """Primitive structure of a space group in the setting of chemistry/symmetry.py."""
    from pymatgen.core import Structure

    species, coords = [], []
    for element, site in atoms:
        images = orbit(np.array(site, float), lattice.matrix, number)
        species += [element] * len(images)
        coords.append(images)
    return Structure(lattice, species, np.concatenate(coords)).get_primitive_structure()


def _lattice(kind: str, *lengths: float) -> Any:
    from pymatgen.core import Lattice

    return getattr(Lattice, kind)(*lengths)


def rocksalt(metal: str, a: float) -> Any:
    """MO."""
    return _group(225, _lattice("cubic", a), [(metal, (0, 0, 0)), ("O", (0.5, 0.5, 0.5))])


def antifluorite(metal: str, a: float) -> Any:
    """M2O."""
    return _group(225, _lattice("cubic", a), [("O", (0, 0, 0)), (metal, (0.25, 0.25, 0.25))])


def wurtzite(metal: str, a: float, c: float) -> Any:
    """MO."""
    atoms = [(metal, (_THIRD, 2 * _THIRD, 0)), ("O", (_THIRD, 2 * _THIRD, 0.382))]
    return _group(186, _lattice("hexagonal", a, c), atoms)


def rutile(metal: str, a: float, c: float) -> Any:
    """MO2."""
    return _group(136, _lattice("tetragonal", a, c), [(metal, (0, 0, 0)), ("O", (0.306, 0.306, 0))])


def corundum(metal: str, a: float, c: float) -> Any:
    """M2O3."""
    return _group(167, _lattice("hexagonal", a, c), [(metal, (0, 0, 0.352)), ("O", (0.306, 0, 0.25))])


def lanthana(metal: str, a: float, c: float) -> Any:
    """M2O3 of the A type."""
    atoms = [(metal, (_THIRD, 2 * _THIRD, 0.2454)), ("O", (_THIRD, 2 * _THIRD, 0.6471)), ("O", (0, 0, 0))]
    return _group(164, _lattice("hexagonal", a, c), atoms)


def hydroxide(metal: str, a: float, c: float) -> Any:
    """M(OH)2, brucite."""
    atoms = [
        (metal, (0, 0, 0)),
        ("O", (_THIRD, 2 * _THIRD, 0.225)),
        ("H", (_THIRD, 2 * _THIRD, 0.427)),
    ]
    return _group(164, _lattice("hexagonal", a, c), atoms)


def calcite(metal: str, a: float, c: float) -> Any:
    """MCO3."""
    atoms = [(metal, (0, 0, 0)), ("C", (0, 0, 0.25)), ("O", (1.28 / a, 0, 0.25))]
    return _group(167, _lattice("hexagonal", a, c), atoms)


def aragonite(metal: str, a: float, b: float, c: float) -> Any:
    """MCO3 in Pmcn; written in Pnma (a, b, c) -> (b, a, c)."""
    atoms = [
        (metal, (0.4163, 0.25, 0.2451)),
        ("C", (0.7570, 0.25, 0.0810)),
        ("O", (0.9011, 0.25, 0.0878)),
        ("O", (0.6839, 0.4595, 0.0790)),
    ]
    return _group(62, _lattice("orthorhombic", b, a, c), atoms)


def zabuyelite() -> Any:
    """Li2CO3, H. Effenberger, J. Zemann, Z. Kristallogr. 150, 133 (1979)."""
    atoms = [
        ("Li", (0.1965, 0.4486, 0.8346)),
        ("C", (0, 0.0657, 0.25)),
        ("O", (0, 0.3210, 0.25)),
        ("O", (0.1458, -0.0652, 0.3129)),
    ]
    return _group(15, _lattice("monoclinic", 8.359, 4.977, 6.194, 114.72), atoms)


def tenorite() -> Any:
    """CuO, S. Asbrink, A. Waskowska, J. Phys.: Condens. Matter 3, 8173 (1991)."""
    atoms = [("Cu", (0.25, 0.25, 0)), ("O", (0, 0.4184, 0.25))]
    return _group(15, _lattice("monoclinic", 4.684, 3.423, 5.129, 99.54), atoms)


def perovskite(a_metal: str, b_metal: str, a: float) -> Any:
    """ABO3, cubic."""
    atoms = [(a_metal, (0, 0, 0)), (b_metal, (0.5, 0.5, 0.5)), ("O", (0.5, 0.5, 0))]
    return _group(221, _lattice("cubic", a), atoms)


def lead_titanate() -> Any:
    """PbTiO3, A. M. Glazer, S. A. Mabud, Acta Cryst. B 34, 1065 (1978)."""
    atoms = [
        ("Pb", (0, 0, 0)),
        ("Ti", (0.5, 0.5, 0.539)),
        ("O", (0.5, 0.5, 0.114)),
        ("O", (0.5, 0, 0.617)),
    ]
    return _group(99, _lattice("tetragonal", 3.904, 4.152), atoms)


def spinel(a_metal: str, b_metal: str, a: float) -> Any:
    """AB2O4, normal, origin choice 1; the oxygen parameter is the mean of the family."""
    atoms = [(a_metal, (0,) * 3), (b_metal, (0.625,) * 3), ("O", (0.388,) * 3)]
    return _group(227, _lattice("cubic", a), atoms)


def olivine(a_metal: str, tetrahedral: str, a: float, b: float, c: float) -> Any:
    """A2BO4 in Pbnm; written in Pnma (a, b, c) -> (b, c, a)."""
    sites = [
        (a_metal, (0.0, 0.0, 0.0)),
        (a_metal, (0.9915, 0.2774, 0.25)),
        (tetrahedral, (0.4262, 0.0940, 0.25)),
        ("O", (0.7657, 0.0913, 0.25)),
        ("O", (0.2215, 0.4474, 0.25)),
        ("O", (0.2777, 0.1628, 0.0331)),
    ]
    return _group(62, _lattice("orthorhombic", b, c, a), [(metal, (y, z, x)) for metal, (x, y, z) in sites])


def layered(a_metal: str, b_metal: str, a: float, c: float) -> Any:
    """A2BO4 of the K2NiF4 type."""
    atoms = [(a_metal, (0, 0, 0.355)), (b_metal, (0, 0, 0)), ("O", (0, 0.5, 0)), ("O", (0, 0, 0.155))]
    return _group(139, _lattice("tetragonal", a, c), atoms)


def double_layered(a_metal: str, b_metal: str, a: float, c: float) -> Any:
    """A3B2O7 (Ruddlesden-Popper, n = 2)."""
    atoms = [
        (a_metal, (0, 0, 0.5)),
        (a_metal, (0, 0, 0.317)),
        (b_metal, (0, 0, 0.098)),
        ("O", (0, 0, 0)),
        ("O", (0, 0, 0.193)),
        ("O", (0, 0.5, 0.095)),
    ]
    return _group(139, _lattice("tetragonal", a, c), atoms)


def pyrochlore(a_metal: str, b_metal: str, a: float) -> Any:
    """A2B2O7, origin choice 1."""
    atoms = [
        (a_metal, (0.625, 0.625, 0.625)),
        (b_metal, (0.125, 0.125, 0.125)),
        ("O", (0.457, 0.25, 0.25)),
        ("O", (0.5, 0.5, 0.5)),
    ]
    return _group(227, _lattice("cubic", a), atoms)


def layered_rocksalt(metal: str, a: float, c: float) -> Any:
    """LiMO2 of the alpha-NaFeO2 type."""
    atoms = [("Li", (0, 0, 0.5)), (metal, (0, 0, 0)), ("O", (0, 0, 0.24))]
    return _group(166, _lattice("hexagonal", a, c), atoms)


def from_prototype(
    found: Reference, replaced: Mapping[str, str] | None = None, cell: Sequence[float] | None = None
) -> Any:
    """An AFLOW structure with other elements and, in its conventional setting, other lengths."""
    structure: Any = found.conventional()
    if cell is not None:
        from pymatgen.core import Lattice, Structure

        angles = structure.lattice.angles
        structure = Structure(Lattice.from_parameters(*cell, *angles), structure.species, structure.frac_coords)
    structure.replace_species(dict(replaced or {}))
    return structure.get_primitive_structure()


Maker = Callable[[], Any]
