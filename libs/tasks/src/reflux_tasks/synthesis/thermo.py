"""Reaction energies from the table of relaxed phases, gases included, and what else the same powders could become.

Solids: CHGNet energies at 0 K, differences of their entropies neglected. A gas is put in through reactions that are
known well: its energy is the mean over decompositions of what the table gives for the solids plus the measured
enthalpy, and its release carries a measured entropy (CRC Handbook of Chemistry and Physics, Standard Thermodynamic
Properties, 298 K). Competition follows M. J. McDermott et al., arXiv 2308.11816 (2023): reactions of the same
precursors are compared per atom of reactants.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev

import numpy as np

from reflux_tasks.canonical import reduced_formula
from reflux_tasks.chemistry.energies import PhaseEnergy, read_table
from reflux_tasks.csp.references import energies as prototype_energies
from reflux_tasks.synthesis.phases import TABLE
from reflux_tasks.synthesis.shelf import GASES, PRECURSORS
from reflux_tasks.synthesis.units import atoms_of

KJ_PER_MOL_IN_EV = 96.485
"""kJ/mol in 1 eV per formula unit."""
_DECOMPOSITIONS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "CO2": {
        "MgCO3": ("MgO", 100.7),
        "CaCO3": ("CaO", 179.2),
        "SrCO3": ("SrO", 234.6),
        "BaCO3": ("BaO", 271.5),
        "MnCO3": ("MnO", 115.4),
        "ZnCO3": ("ZnO", 68.8),
        "Li2CO3": ("Li2O", 224.5),
    },
    "H2O": {"Mg(OH)2": ("MgO", 81.1), "Ca(OH)2": ("CaO", 108.5)},
}
"""Solid -> what is left, and the enthalpy of decomposition in kJ/mol at 298 K, by the gas that leaves."""
RELEASE_ENTROPY: Mapping[str, float] = {"CO2": 170.0, "H2O": 148.0}
"""J/(mol K) per molecule that leaves a solid, mean over Mg, Ca, Sr and Ba; at 1 bar of the gas."""


@dataclass(frozen=True)
class Substance:
    """A phase or gas that a reaction can hold."""

    formula: str
    amounts: Mapping[str, float]
    """Atoms per formula unit."""
    energy: float
    """eV per formula unit."""

    @property
    def atoms(self) -> float:
        return sum(self.amounts.values())


@functools.lru_cache(maxsize=1)
def solids() -> dict[str, Substance]:
    """Solids of the task by formula."""
    return {name: _substance(name, phase) for name, phase in read_table(TABLE).items()}


@functools.lru_cache(maxsize=1)
def competitors() -> tuple[Substance, ...]:
    """What powders may become: the task's solids and the oxides of the AFLOW collection, each formula once."""
    lowest = {reduced_formula(name)[0]: solid for name, solid in solids().items()}
    for name, phase in prototype_energies().items():
        key = "".join(f"{element}{int(phase.amounts[element])}" for element in sorted(phase.amounts))
        if "O" in phase.amounts and len(phase.amounts) > 1 and key not in lowest:
            lowest[key] = _substance(name.rpartition("_")[0], phase)
    return tuple(lowest[key] for key in sorted(lowest))


def _substance(formula: str, phase: PhaseEnergy) -> Substance:
    amounts = dict(atoms_of(formula))
    return Substance(formula, amounts, phase.energy * sum(amounts.values()))


@functools.lru_cache(maxsize=1)
def gases() -> dict[str, Substance]:
    """Gases by formula, at 0 K and without entropy."""
    return {name: Substance(name, dict(atoms_of(name)), mean(_gas_energies(name))) for name in GASES}


def gas_spread(name: str) -> float:
    """Standard deviation in eV of a gas's energy over the decompositions that define it: the error of this scheme."""
    return pstdev(_gas_energies(name))


def _gas_energies(name: str) -> list[float]:
    known = solids()
    return [
        known[solid].energy - known[left].energy + enthalpy / KJ_PER_MOL_IN_EV
        for solid, (left, enthalpy) in _DECOMPOSITIONS[name].items()
    ]


def release_energy(name: str, kelvin: float) -> float:
    """Energy in eV of one molecule of gas minus what its entropy brings at a temperature."""
    return gases()[name].energy - kelvin * RELEASE_ENTROPY[name] / 1000 / KJ_PER_MOL_IN_EV


def reaction_energy(
    reactants: Mapping[str, float],
    target: Substance,
    target_amount: float,
    gas_amounts: Mapping[str, float],
    kelvin: float,
) -> float:
    """Free energy in eV per atom of reactants; negative when the target is stable against the precursors."""
    known = solids()
    products = target_amount * target.energy
    products += sum(amount * release_energy(gas, kelvin) for gas, amount in gas_amounts.items())
    consumed = sum(amount * known[name].energy for name, amount in reactants.items())
    return (products - consumed) / _atoms(reactants)


def _atoms(reactants: Mapping[str, float]) -> float:
    return sum(amount * solids()[name].atoms for name, amount in reactants.items())


@dataclass(frozen=True)
class Competition:
    """The best of the other reactions of some precursors."""

    formula: str
    energy: float
    """Free energy in eV per atom of reactants."""


def best_competitor(precursors: Sequence[str], target: str, kelvin: float) -> Competition | None:
    """The phase other than the target that the precursors, in any proportion, react to with the lowest energy."""
    known = solids()
    powders = [known[name] for name in precursors]
    reach = {element for powder in powders for element in powder.amounts}
    aims = (
        other for other in competitors() if other.formula not in PRECURSORS and set(other.amounts) <= reach
    )  # what stays or falls apart into powders is no competition
    target_key = reduced_formula(target)[0]
    found = [
        result
        for aim in aims
        if reduced_formula(aim.formula)[0] != target_key and (result := _reach(powders, aim, kelvin)) is not None
    ]
    return min(found, key=lambda result: result.energy, default=None)


def _reach(powders: Sequence[Substance], aim: Substance, kelvin: float) -> Competition | None:
    """The best balance of powders -> aim + gases, as a linear programme; None when there is none."""
    from scipy.optimize import linprog

    released = [(gases()[name], release_energy(name, kelvin)) for name in GASES]
    elements = sorted({element for each in (*powders, *(gas for gas, _ in released)) for element in each.amounts})
    columns = [*(_column(powder, elements) for powder in powders), *(-_column(gas, elements) for gas, _ in released)]
    cost = [*(-powder.energy for powder in powders), *(energy for _, energy in released)]
    found = linprog(cost, A_eq=np.array(columns).T, b_eq=_column(aim, elements), bounds=(0, None), method="highs")
    if found.status != 0:
        return None
    atoms = sum(amount * powder.atoms for amount, powder in zip(found.x[: len(powders)], powders, strict=True))
    return Competition(aim.formula, float((found.fun + aim.energy) / atoms))


def _column(substance: Substance, elements: Iterable[str]) -> np.ndarray:
    return np.array([substance.amounts.get(element, 0.0) for element in elements])
