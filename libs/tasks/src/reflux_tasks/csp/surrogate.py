"""The surrogate verifier: match with the known structures, and the energy of the proposal as it is."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reflux_tasks.canonical import Form
from reflux_tasks.chemistry import charges
from reflux_tasks.chemistry.mlip import EnergyUnknown, energy_per_atom, load_model
from reflux_tasks.csp.payload import (
    MATCH_STOL,
    Proposal,
    Truth,
    canonical_text,
    grade_proposals,
    match,
    parse_truth,
    symmetry_of,
)
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier

ENERGY_WINDOW = 0.5
"""eV per atom above the lowest known polymorph at which the energy part ends; the structure is not relaxed."""
FLOOR = -0.1
"""eV per atom below the known phases beyond which an energy is taken for an error of the potential."""
WORST = 5.0
"""Finite stand-in for an energy that is not known or not finite, eV per atom above the known phases."""


class SurrogateVerifier(Verifier):
    """Reward = gate * (0.5 M + 0.5 E).

    M = (1 - rms / 0.5)^2 for the best match by StructureMatcher (ltol 0.3, stol 0.5, angle_tol 10; the rms distance is
    normalised and at most 0.5), 0 without a match. E = clip(1 - dE / 0.5, 0, 1), dE in eV per atom from CHGNet without
    relaxation, above the relaxed energy of the lowest known polymorph. dE below -0.1 lies outside what the potential
    can know: it is clipped there, flagged, and earns nothing. SMACT is a figure only: the composition is given.
    """

    name: ClassVar[str] = "surrogate"
    version: ClassVar[str] = "csp-surrogate-1"
    fidelity: ClassVar[Fidelity] = "surrogate"
    trusted: ClassVar[bool] = True
    cost_seconds: ClassVar[float] = 0.2
    canonical_form: ClassVar[Form] = "own"

    def prepare(self) -> None:
        load_model()
        charges.prepare()

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        del payload
        return canonical_text(answer)

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        return grade_proposals(truth, answers, lambda proposal: _grade(truth, proposal))


def _grade(truth: Truth, proposal: Proposal) -> Grade:
    found = match(truth, proposal.structure)
    detail = match_detail(truth, proposal, found)
    try:
        above = energy_per_atom(proposal.structure) - truth.ground_energy
    except EnergyUnknown as error:
        above = WORST
        detail["energy"] = str(error)
    above, flagged = clip_energy(above)
    reward = 0.5 * match_score(found) + 0.5 * energy_score(above, flagged, ENERGY_WINDOW)
    return Grade("scored", round(reward, 4), detail | {"e_above_known": round(above, 4), "out_of_range": int(flagged)})


def match_detail(truth: Truth, proposal: Proposal, found: tuple[str, float] | None) -> dict[str, Any]:
    """Figures of a match for people; `r_rmse` is there for matched answers only, as the benchmarks average it."""
    formula = "".join(f"{element}{count}" for element, count in truth.amounts.items())
    detail: dict[str, Any] = {
        "r_match": int(found is not None),
        "exact": int(found is not None),
        "smact": int(charges.charge_balanced(formula)),
        "space_group": symmetry_of(proposal.structure)[0],
    }
    return detail if found is None else detail | {"r_rmse": round(found[1], 4), "matched": found[0]}


def match_score(found: tuple[str, float] | None) -> float:
    """1 for an exact match, 0 for the loosest and for none.

    Squared, because one random arrangement of atoms in six matches rutile at these tolerances, with rms around 0.4.
    """
    return 0.0 if found is None else max(0.0, 1.0 - found[1] / MATCH_STOL) ** 2


def clip_energy(above: float) -> tuple[float, bool]:
    """Energy in eV per atom between floor and worst value, and whether it was below what can be; NaN is the worst."""
    if not above <= WORST:
        return WORST, False
    return max(above, FLOOR), above < FLOOR


def energy_score(above: float, flagged: bool, window: float) -> float:
    """1 at or below the known phases, 0 from `window` eV per atom on, and 0 for a flagged energy."""
    return 0.0 if flagged else min(1.0, max(0.0, 1.0 - above / window))
