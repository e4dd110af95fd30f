"""Energies of known phases: tables that ship with the tasks, and what competes with a composition.

A table is made once by `write_table` (minutes of CHGNet) and read by every verifier, so that grading needs no second
relaxation of constants. It records the model; another model needs another table.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.chemistry.mlip import MODEL, MODEL_SOURCE, EnergyUnknown, energy_per_atom, relax

log = logging.getLogger(__name__)
TABLE_STEPS = 200
"""Relaxation steps of a row; those that do not converge keep the last, lowest energy."""


@dataclass(frozen=True)
class PhaseEnergy:
    """One phase after its relaxation."""

    name: str
    amounts: Mapping[str, float]
    """Atoms per formula unit by element."""
    energy: float
    """eV per atom."""
    start_energy: float
    """Before the relaxation, eV per atom."""
    converged: bool

    @property
    def atoms(self) -> float:
        """Atoms per formula unit."""
        return sum(self.amounts.values())


def write_table(path: Path, source: str, structures: Iterable[tuple[str, Any]]) -> None:
    """Relaxes named pymatgen Structures and writes their energies; phases outside the model's reach are left out.

    `source` says where the structures come from, with licence and citation.
    """
    from pymatgen.core import Composition

    rows = []
    for name, structure in structures:
        try:
            start, end = energy_per_atom(structure), relax(structure, TABLE_STEPS)
        except EnergyUnknown as error:
            log.warning("%s has no energy: %s", name, error)
            continue
        formula = structure.composition.get_integer_formula_and_factor()[0]
        amounts = {element: float(count) for element, count in Composition(formula).as_dict().items()}
        rows.append(asdict(PhaseEnergy(name, amounts, round(end.energy, 5), round(start, 5), end.converged)))
        log.info("%s: %.4f eV/atom after %d steps", name, end.energy, end.steps)
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'"model": "{MODEL}", "source": {json.dumps(f"{source}; energies: {MODEL_SOURCE}")}'
    path.write_text(f'{{{head}, "phases": [\n{lines}\n]}}\n', encoding="ascii")


def read_table(path: Path) -> dict[str, PhaseEnergy]:
    """Phases of a shipped table by name; raises ValueError when it belongs to another model."""
    document = json.loads(path.read_text(encoding="ascii"))
    if document["model"] != MODEL:
        raise ValueError(f"{path.name} holds energies of {document['model']}, this is {MODEL}: make it again")
    return {row["name"]: PhaseEnergy(**row) for row in document["phases"]}


def competing_energy(amounts: Mapping[str, float], phases: Sequence[PhaseEnergy]) -> float | None:
    """Lowest energy in eV per atom of any mixture of `phases` with this composition; None when none has it.

    The convex hull at one composition, as a linear programme; unlike a phase diagram it needs no elemental phases.
    """
    from scipy.optimize import linprog

    inside = [phase for phase in phases if set(phase.amounts) <= set(amounts)]
    if not inside:
        return None
    total = sum(amounts.values())
    elements = sorted(amounts)
    shares = np.array([[phase.amounts.get(element, 0.0) / phase.atoms for phase in inside] for element in elements])
    wanted = np.array([amounts[element] / total for element in elements])
    found = linprog([phase.energy for phase in inside], A_eq=shares, b_eq=wanted, bounds=(0, None), method="highs")
    return float(found.fun) if found.status == 0 else None
