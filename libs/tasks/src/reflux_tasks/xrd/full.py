"""The full verifier: a Rietveld refinement of the proposed phases against a profile of the true sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from reflux_tasks import progress
from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier, answer_words
from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.align import align
from reflux_tasks.xrd.answers import NamedPhase, parse_answer
from reflux_tasks.xrd.database import PhaseDatabase, candidate, lengths
from reflux_tasks.xrd.measurement import simulate_measurement
from reflux_tasks.xrd.payload import parse_truth
from reflux_tasks.xrd.phases import Phase
from reflux_tasks.xrd.profile import Profile, snip_background
from reflux_tasks.xrd.refinement import MAX_PHASES, RefinementOptions, refine, system_python
from reflux_tasks.xrd.verdict import at_limit, fit_detail, judge

CELL_REACH = 0.006
"""Largest relative change of a cell length in the refinement, from the aligned start."""
MAX_STARTS = 2
MAX_STRETCH = 0.016
"""Largest relative difference of a cell length from the database's; samples are strained by 0.013 at most."""
OPTIONS = RefinementOptions(shift="zero", cell_limit=CELL_REACH)


class FullVerifier(Verifier):
    """Reward = gate * clip((0.45 - R_wb - 0.02 * phases) / 0.30, 0, 1).

    R_wb = sqrt(sum w (yo - yc)^2 / sum w (yo - b)^2) with w = 1 / max(yo, 1) over all points, b the background
    estimate. The observed profile yo is simulated with counting statistics from the strained true structures
    (measurement.py). The gate is 1 when the answer names 1 to 5 different phases of the database with allowed elements
    only, and after the refinement every scale is positive, every phase is needed (need >= 0.12, see
    verdict.py), no cell length has run into its limit and none is more than 1.6 % off the database's; else 0. An
    answer against the grammar is `invalid`.
    """

    name: ClassVar[str] = "full"
    version: ClassVar[str] = "full-3"
    fidelity: ClassVar[Fidelity] = "full"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 1.0
    canonical_form: ClassVar[Form] = "parts"

    def __init__(self, database: PhaseDatabase, python: Path | None = None) -> None:
        self.database = database
        self.python = python

    def prepare(self) -> None:
        self.database.load()
        self.python = self.python or system_python()

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        profile = simulate_measurement(truth, self.database)
        background = snip_background(profile)
        known: dict[frozenset[str], Grade] = {}
        grades = []
        for answer in progress.tracked(answers):
            try:
                named = parse_answer(answer_words(answer))
            except InvalidAnswer as error:
                grades.append(Grade("invalid", 0.0, {"reason": str(error)}))
                continue
            refusal = self._refusal(named, truth.elements)
            if refusal:
                grades.append(Grade("scored", 0.0, {"gate": refusal}))
                continue
            key = frozenset(phase.text for phase in named)  # the order of an answer means nothing to a refinement
            if key not in known:
                known[key] = self._refined(sorted(key), profile, background)
            grades.append(known[key])
        return grades

    def _refusal(self, named: Sequence[NamedPhase], allowed: frozenset[str]) -> str:
        """Why an answer is not worth a refinement; empty when it is."""
        if len(named) > MAX_PHASES:
            return f"more than {MAX_PHASES} phases"
        if len({phase.text for phase in named}) < len(named):
            return "a phase twice"
        if any(not phase.elements <= allowed for phase in named):
            return "an element that is not in the sample"
        if any(phase.text not in self.database.phases for phase in named):
            return "a phase that is not in the database"
        return ""

    def _refined(self, texts: Sequence[str], profile: Profile, background: np.ndarray) -> Grade:
        phases = [self.database.phases[text] for text in texts]
        stretches = [align(profile, background, phase) for phase in phases]
        for _ in range(MAX_STARTS):
            starts = [candidate(phase, stretch) for phase, stretch in zip(phases, stretches, strict=True)]
            fit = refine(profile, starts, OPTIONS, self.python)
            stretches = [np.array(end.cell) / lengths(phase) for end, phase in zip(fit.phases, phases, strict=True)]
            if not any(at_limit(phase, OPTIONS.cell_limit) for phase in fit.phases):
                break  # else peaks of another phase misled the alignment: go on from where the cell was stopped
        verdict = judge(fit, OPTIONS.cell_limit, _distance_reason(phases, stretches))
        return Grade("scored", verdict.score, {"gate": verdict.gate, **fit_detail(fit)})


def _distance_reason(phases: Sequence[Phase], stretches: Sequence[np.ndarray]) -> str:
    for phase, stretch in zip(phases, stretches, strict=True):
        if np.abs(stretch - 1).max() > MAX_STRETCH:
            return f"{phase.name}: cell too far from the database's"
    return ""
