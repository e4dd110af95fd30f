"""Energies of targets that the table lacks: CHGNet's relaxation of a structure that the payload brings."""

import functools

from reflux_tasks.canonical import reduced_formula
from reflux_tasks.chemistry.energies import TABLE_STEPS
from reflux_tasks.chemistry.mlip import relax
from reflux_tasks.synthesis.thermo import Substance
from reflux_tasks.synthesis.units import atoms_of
from reflux_tasks.xrd.structure_files import read_text


@functools.lru_cache(maxsize=64)
def computed_substance(formula: str, text: str) -> Substance:
    """The relaxed structure of a CIF or POSCAR, made as the rows of the table are (seconds to a minute).

    Raises ValueError for a structure that cannot be read, has another composition or is beyond CHGNet, and
    VerifierUnavailable without it.
    """
    structure = read_text(formula, text).primitive
    if reduced_formula(structure.composition.reduced_formula)[0] != reduced_formula(formula)[0]:
        raise ValueError(f"the structure is {structure.composition.reduced_formula}, not {formula}")
    amounts = dict(atoms_of(formula))
    return Substance(formula, amounts, relax(structure, TABLE_STEPS).energy * sum(amounts.values()))
