"""The verdict on a Rietveld refinement: gate, cost, score, acceptance. One recipe for simulated and measured patterns.

    gate     1 to 5 different phases; every scale positive; every need >= 0.12; no cell length at its limit
    cost     R_wb + 0.02 * phases
    score    gate * clip((0.45 - cost) / 0.30, 0, 1)
    accepted gate, and R_model <= 0.17: a set that stands by itself, without comparison with others

R_wb and need are defined in rietveld/figures.py; R_model = R_wb sqrt(1 - 1 / goodness^2) is what R_wb is beyond the
counting statistics, so that a short scan is judged as a long one. R_wp or R_wb alone would reward surplus phases,
because each one lowers them a little; a phase costs more than the largest such gain on measured mixtures (0.008).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from reflux_tasks.xrd.refinement import Fit, PhaseFit

MIN_NEED = 0.12
"""Between the largest need of a wrong phase (0.05) and the smallest of a true one of 10 % mass and more (0.30)."""
CELL_EDGE = 0.95
"""A cell length this close to its limit has run into it."""
PHASE_PENALTY = 0.02
WORST_COST = 0.45
BEST_COST = 0.15
MAX_ACCEPTED_R_MODEL = 0.17


@dataclass(frozen=True)
class Verdict:
    """What a refinement says about its phase set."""

    gate: str
    """Why the set is refused; empty when it is not."""
    fit: Fit

    @property
    def cost(self) -> float:
        """R_wb + 0.02 per phase; orders sets that passed the gate."""
        return self.fit.r_wb + PHASE_PENALTY * len(self.fit.phases)

    @property
    def score(self) -> float:
        """Quality, 0 to 1; 0 when the gate refused."""
        return 0.0 if self.gate else float(np.clip((WORST_COST - self.cost) / (WORST_COST - BEST_COST), 0.0, 1.0))

    @property
    def accepted(self) -> bool:
        """Whether the set stands by itself."""
        return not self.gate and self.fit.r_model <= MAX_ACCEPTED_R_MODEL

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts sets, the best first: those that passed the gate, by cost."""
        return (bool(self.gate), self.cost)


def judge(fit: Fit, cell_limit: float, further_gate: str = "") -> Verdict:
    """The verdict on a fit whose cell lengths could change by the share `cell_limit`; `further_gate` refuses, too."""
    return Verdict(_gate(fit, cell_limit) or further_gate, fit)


def at_limit(phase: PhaseFit, cell_limit: float) -> bool:
    """Whether a cell length has run into its limit, where a least-squares minimum means nothing."""
    return phase.cell_shift > CELL_EDGE * cell_limit


def _gate(fit: Fit, cell_limit: float) -> str:
    """Need tells surplus phases; significance tests and mass fractions do not."""
    for phase in fit.phases:
        if not phase.scale > 0:
            return f"{phase.name}: negative scale"
        if not phase.need >= MIN_NEED:
            return f"{phase.name}: not needed"
        if at_limit(phase, cell_limit):
            return f"{phase.name}: cell at its limit"
    return ""


def fit_detail(fit: Fit) -> dict[str, Any]:
    """Figures of a refinement for people, JSON types only."""
    return {
        "r_wp": round(fit.r_wp, 5),
        "r_wb": round(fit.r_wb, 5),
        "r_model": round(fit.r_model, 5),
        "goodness": round(fit.goodness, 3),
        "phases": {
            phase.name: {"mass_fraction": round(phase.mass_fraction, 4), "need": round(phase.need, 4)}
            for phase in fit.phases
        },
        "cpu_seconds": round(fit.cpu_seconds, 3),
    }
