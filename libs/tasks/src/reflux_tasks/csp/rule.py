"""The rule verifier: symmetry and volume against the known structures, no energies."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reflux_tasks.canonical import Form
from reflux_tasks.csp.payload import KnownStructure, Proposal, canonical_text, grade_proposals, parse_truth, symmetry_of
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier

VOLUME_TOLERANCE = 0.10


class RuleVerifier(Verifier):
    """Reward = gate * max over known structures of same space group * (0.4 + 0.3 same orbits + 0.3 volume within 10 %).

    The gate is the wanted composition. The space group is that of the structure (spglib, 0.1 A), not the one that the
    answer names, so that a structure written in P1 earns the same.
    """

    name: ClassVar[str] = "rule"
    version: ClassVar[str] = "csp-rule-1"
    fidelity: ClassVar[Fidelity] = "rule"
    trusted: ClassVar[bool] = True
    cost_seconds: ClassVar[float] = 0.01
    canonical_form: ClassVar[Form] = "own"

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        del payload
        return canonical_text(answer)

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        return grade_proposals(truth, answers, lambda proposal: _grade(truth.known, proposal))


def _grade(known: Sequence[KnownStructure], proposal: Proposal) -> Grade:
    group, orbits = symmetry_of(proposal.structure)
    volume = proposal.structure.volume / len(proposal.structure)
    rewards = [_agreement(each, group, orbits, volume) for each in known]
    reward = max(rewards)
    detail = {"space_group": group, "volume_per_atom": round(volume, 3), "exact": int(reward >= 1.0)}
    return Grade("scored", reward, detail)


def _agreement(known: KnownStructure, group: int, orbits: tuple[tuple[str, int], ...], volume: float) -> float:
    if group != known.symmetry[0]:
        return 0.0
    expected = known.structure.volume / len(known.structure)
    close = abs(volume / expected - 1) <= VOLUME_TOLERANCE
    return round(0.4 + 0.3 * (orbits == known.symmetry[1]) + 0.3 * close, 6)
