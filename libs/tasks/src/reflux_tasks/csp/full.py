"""The dear verifiers: CHGNet relaxation against competing phases, then density functional theory where it can."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reflux_tasks.canonical import Form
from reflux_tasks.chemistry import charges, espresso
from reflux_tasks.chemistry.energies import competing_energy
from reflux_tasks.chemistry.mlip import EnergyUnknown, Relaxed, load_model, relax
from reflux_tasks.csp.payload import Proposal, Truth, canonical_text, grade_proposals, match, parse_truth
from reflux_tasks.csp.references import energies
from reflux_tasks.csp.surrogate import WORST, clip_energy, energy_score, match_detail, match_score
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier

RELAX_STEPS = 60
HULL_WINDOW = 0.2
"""eV per atom above the competing phases at which the energy part of a relaxed structure ends."""
DFT_WINDOW = 0.3
"""A structure that CHGNet puts further above the competing phases is not worth a calculation."""


class RelaxedVerifier(Verifier):
    """Reward = gate * (0.5 M + 0.5 E) with M of the proposal as in the surrogate and E after relaxation.

    E = clip(1 - dE / 0.2, 0, 1); dE in eV per atom is CHGNet's energy after at most 60 FIRE steps above the convex
    hull of the collection's relaxed phases with these elements, at the wanted composition (`competing_energy`). As in
    the surrogate, dE below -0.1 is clipped, flagged and earns nothing. The match is that of the proposal, not of the
    relaxed structure: the relaxation must not do the model's work.
    """

    name: ClassVar[str] = "relaxed"
    version: ClassVar[str] = "csp-relaxed-1"
    fidelity: ClassVar[Fidelity] = "full"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 3.0
    canonical_form: ClassVar[Form] = "own"

    def prepare(self) -> None:
        load_model()
        charges.prepare()
        energies()

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        del payload
        return canonical_text(answer)

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        return grade_proposals(truth, answers, lambda proposal: self._grade(truth, proposal))

    def _grade(self, truth: Truth, proposal: Proposal) -> Grade:
        found = match(truth, proposal.structure)
        detail = match_detail(truth, proposal, found)
        try:
            end = relax(proposal.structure, RELAX_STEPS)
        except EnergyUnknown as error:
            above, flagged = WORST, False
            detail["energy"] = str(error)
        else:
            above, flagged, further = self._energies(truth, end)
            detail |= further
        reward = 0.5 * match_score(found) + 0.5 * energy_score(above, flagged, HULL_WINDOW)
        return Grade(
            "scored", round(reward, 4), detail | {"e_above_hull": round(above, 4), "out_of_range": int(flagged)}
        )

    def _energies(self, truth: Truth, end: Relaxed) -> tuple[float, bool, dict[str, Any]]:
        """Energy above the hull, clipped, whether it was clipped, and figures."""
        above, flagged = clip_energy(end.energy - hull_energy(truth))
        return above, flagged, {"relax_steps": end.steps, "converged": int(end.converged)}


class FullVerifier(RelaxedVerifier):
    """As `relaxed`, with the energy from Quantum ESPRESSO for compositions that its pseudopotentials cover.

    dE = (CHGNet: lowest known polymorph above the hull) + (pw.x: relaxed proposal above that polymorph, relaxed too).
    Structures with more than 12 atoms, or more than 0.3 eV per atom above the hull by CHGNet, keep CHGNet's energy;
    so do elements that are not covered. Energies below the floor, where CHGNet is out of its range, are decided here.
    """

    name: ClassVar[str] = "full"
    version: ClassVar[str] = "csp-full-2"
    cost_seconds: ClassVar[float] = 30.0
    motion: ClassVar[espresso.Motion] = "none"
    """What pw.x relaxes, in the proposal and the polymorph alike."""

    def prepare(self) -> None:
        super().prepare()
        espresso.program()

    def _energies(self, truth: Truth, end: Relaxed) -> tuple[float, bool, dict[str, Any]]:
        espresso.program()
        above, flagged, detail = super()._energies(truth, end)
        pseudos = espresso.choose_pseudopotentials(truth.amounts)
        ground = truth.ground
        atoms = max(len(end.structure), len(ground.structure))
        if pseudos is None or atoms > espresso.MAX_ATOMS or above > DFT_WINDOW:
            return above, flagged, detail | {"dft": 0}
        reference = relax(ground.structure, RELAX_STEPS).structure
        proposed, known = (espresso.total_energy(each, pseudos, self.motion) for each in (end.structure, reference))
        difference = proposed - known
        above, flagged = clip_energy(ground.energy - hull_energy(truth) + difference)
        figures = {"dft": 1, "dft_difference": round(difference, 4), "dft_mixed": int(pseudos.mixed)}
        return above, flagged, detail | figures


class FullRelaxVerifier(FullVerifier):
    """As `full`, and pw.x goes on from CHGNet's geometries for a few steps of BFGS over atoms and cell.

    For the last few meV per atom, where CHGNet's minimum is not that of density functional theory.
    """

    name: ClassVar[str] = "full-relax"
    version: ClassVar[str] = "csp-full-relax-1"
    cost_seconds: ClassVar[float] = 150.0
    motion: ClassVar[espresso.Motion] = "cell"


def hull_energy(truth: Truth) -> float:
    """Energy in eV per atom of the phases that compete with the composition; at most the lowest known polymorph's."""
    amounts = {element: float(count) for element, count in truth.amounts.items()}
    competing = competing_energy(amounts, list(energies().values()))
    return truth.ground_energy if competing is None else min(competing, truth.ground_energy)
