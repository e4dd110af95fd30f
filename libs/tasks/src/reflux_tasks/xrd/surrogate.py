"""The surrogate verifier: simulated patterns of the proposed phases against the observed peak list; needs no labels."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, TierName, Verifier, answer_words
from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.answers import NamedPhase, parse_answer
from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.patterns import TWO_THETA_MAX_DEGREES, TWO_THETA_MIN_DEGREES
from reflux_tasks.xrd.payload import parse_truth
from reflux_tasks.xrd.phases import WAVELENGTH_ANGSTROM, Phase, line_angles

MAX_PHASES = 5
PHASE_PENALTY = 0.05
IDLE_PENALTY = 0.1
"""For a phase that explains less than 15 % of the pattern's norm."""
IDLE_SHARE = 0.15
FOREIGN_PENALTY = 0.15
"""For a phase that is not in the database."""
F1_TOLERANCE = 0.006
"""Largest difference in ln d between peaks that match."""
_STEP, _SIGMA, _MAX_SHIFT = 0.002, 0.005, 6
"""Grid of ln d, peak width and largest shift in steps: +-1.2 % of strain."""


class SurrogateVerifier(Verifier):
    """Reward = max(0, 1 - R^2 - 0.05 (phases - 1) - 0.1 idle - 0.15 unknown), 0 with a foreign or repeated phase.

    R = sqrt(sum (sqrt yo - sqrt yc)^2 / sum yo) over a grid of ln d, where equal weights on square roots are the
    weights 1 / (4 yo) of counting statistics on intensities. Each phase's simulated pattern is shifted by up to 1.2 %
    (isotropic strain) to its best place, then non-negative least squares mixes them. `peak_f1` in the detail is the
    harmonic mean of the shares of observed and simulated peaks that have a partner, weighted by the square root of
    intensity.
    """

    name: ClassVar[str] = "surrogate"
    version: ClassVar[str] = "surrogate-2"
    fidelity: ClassVar[Fidelity] = "surrogate"
    trusted: ClassVar[bool] = True
    weakest_tier: ClassVar[TierName] = "process"
    cost_seconds: ClassVar[float] = 5e-4
    canonical_form: ClassVar[Form] = "parts"

    def __init__(self, database: PhaseDatabase) -> None:
        self.database = database
        self._templates: dict[str, np.ndarray] = {}

    def prepare(self) -> None:
        import scipy.optimize  # noqa: F401

        self.database.load()

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        observed = self._broaden(truth.two_theta, truth.intensity)
        grades = []
        for answer in answers:
            try:
                named = parse_answer(answer_words(answer))
            except InvalidAnswer as error:
                grades.append(Grade("invalid", 0.0, {"reason": str(error)}))
                continue
            grades.append(self._grade(named, truth.elements, observed, (truth.two_theta, truth.intensity)))
        return grades

    def _grade(
        self, named: Sequence[NamedPhase], allowed: frozenset[str], observed: np.ndarray, peaks: tuple[np.ndarray, ...]
    ) -> Grade:
        if len(named) > MAX_PHASES:
            return Grade("scored", 0.0, {"gate": f"more than {MAX_PHASES} phases"})
        if len({phase.text for phase in named}) < len(named):
            return Grade("scored", 0.0, {"gate": "a phase twice"})
        if any(not phase.elements <= allowed for phase in named):
            return Grade("scored", 0.0, {"gate": "an element that is not in the sample"})
        # sorted: sums in floating point depend on the order, a grade may not
        known = sorted(phase.text for phase in named if phase.text in self.database.phases)
        if not known:
            return Grade("scored", 0.0, {"gate": "no phase of the database"})
        residual, idle, shifts = self._fit(known, observed)
        penalty = PHASE_PENALTY * (len(named) - 1) + IDLE_PENALTY * idle + FOREIGN_PENALTY * (len(named) - len(known))
        phases = [self.database.phases[text] for text in known]
        detail = {"profile_r": round(residual, 5), "peak_f1": round(peak_f1(phases, shifts, peaks), 5), "idle": idle}
        return Grade("scored", max(0.0, 1 - residual**2 - penalty), detail)

    def _fit(self, texts: Sequence[str], observed: np.ndarray) -> tuple[float, int, list[float]]:
        """R, the number of idle phases, and the shift in ln d of each phase."""
        from scipy.optimize import nnls

        columns, shifts = [], []
        for text in texts:
            shifted = self._shifted(text)
            overlap = (shifted @ observed) / (np.linalg.norm(shifted, axis=1) + 1e-9)
            best = int(np.argmax(overlap))
            columns.append(shifted[best])
            shifts.append((best - _MAX_SHIFT) * _STEP)
        matrix = np.array(columns).T
        weights, residual = nnls(matrix, observed)
        norm = float(np.linalg.norm(observed)) or 1.0
        parts = weights * np.linalg.norm(matrix, axis=0)
        return float(residual) / norm, int((parts < IDLE_SHARE * norm).sum()), shifts

    @cached_property
    def _grid(self) -> np.ndarray:
        ends = _ln_d(np.array([TWO_THETA_MAX_DEGREES, TWO_THETA_MIN_DEGREES]))
        return np.arange(ends[0] - 0.02, ends[1] + 0.02, _STEP)

    def _broaden(self, two_theta: np.ndarray, intensity: np.ndarray) -> np.ndarray:
        """Square-root intensities as Gaussians on the grid of ln d, where strain is a shift."""
        distance = (self._grid[None] - _ln_d(two_theta)[:, None]) / _SIGMA
        return (np.sqrt(intensity)[:, None] * np.exp(-0.5 * distance**2)).sum(axis=0)

    def _shifted(self, text: str) -> np.ndarray:
        """Template of a phase at all shifts [shifts, grid]."""
        if text not in self._templates:
            template = self._broaden(*_visible_lines(self.database.phases[text]))
            steps = range(-_MAX_SHIFT, _MAX_SHIFT + 1)
            self._templates[text] = np.stack([np.roll(template, step) for step in steps])
        return self._templates[text]


def peak_f1(phases: Sequence[Phase], shifts: Sequence[float], peaks: tuple[np.ndarray, ...]) -> float:
    """Harmonic mean of recall and precision of peaks, 0 to 1; simulated lines are the 12 strongest of each phase."""
    observed, heights = _ln_d(peaks[0]), np.sqrt(peaks[1])
    simulated, weights = [], []
    for phase, shift in zip(phases, shifts, strict=True):
        two_theta, intensity = _visible_lines(phase)
        chosen = np.argsort(-intensity, kind="stable")[:12]
        simulated.append(_ln_d(two_theta[chosen]) + shift)
        weights.append(np.sqrt(intensity[chosen]))
    positions, sizes = np.concatenate(simulated), np.concatenate(weights)
    if not len(observed) or not len(positions):
        return 0.0
    close = np.abs(observed[:, None] - positions[None]) < F1_TOLERANCE
    recall = float((close.any(axis=1) * heights).sum() / heights.sum())
    precision = float((close.any(axis=0) * sizes).sum() / sizes.sum())
    return 2 * recall * precision / (recall + precision) if recall + precision else 0.0


def _visible_lines(phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    hkl, intensity = phase.strongest
    two_theta = line_angles(phase.lattice, hkl)
    seen = (two_theta > TWO_THETA_MIN_DEGREES) & (two_theta < TWO_THETA_MAX_DEGREES)
    return two_theta[seen], intensity[seen]


def _ln_d(two_theta: np.ndarray) -> np.ndarray:
    return np.log(WAVELENGTH_ANGSTROM / 2 / np.sin(np.radians(two_theta / 2)))
