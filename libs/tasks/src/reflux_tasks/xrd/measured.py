"""The verifier for a laboratory's own pattern: phase sets out of its own structures, by Rietveld refinement."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from reflux_tasks import progress
from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, VerificationError, Verifier
from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.bounded import OverLimit, call_bounded
from reflux_tasks.xrd.measured_answers import MeasuredAnswer, parse_measured_answer
from reflux_tasks.xrd.measured_payload import MEASURED_OPTIONS, MeasuredPayload, parse_measured_payload
from reflux_tasks.xrd.refinement import MAX_PHASES, RefinementRefused, refine, system_python
from reflux_tasks.xrd.structure_files import Structure, UnreadableStructure, read_folder, read_text
from reflux_tasks.xrd.verdict import Verdict, fit_detail, judge

FRACTION_SHARE = 0.3
"""Part of the reward that only claimed mass fractions earn."""
RIGHT_FRACTION, WRONG_FRACTION = 0.05, 0.15
"""Claims whose worst phase is off by this much earn all of that part, or none of it."""
MAX_RIVALS = 3
"""Sets that are refined beside an answer's, each with one phase replaced by a candidate of its type and cell."""
RIVAL_MARGIN = 0.002
"""R_wb by which such a set must fit better: where two cannot be told apart, both earn."""
SAME = "a phase twice"
OVERLAP = "two phases of one structure type whose lines overlap"


class MeasuredVerifier(Verifier):
    """Reward of a phase set on a measured pattern: score * (0.7 + 0.3 * F), the score as `verdict.py` defines it.

    F = clip((0.15 - worst) / 0.10, 0, 1), `worst` the largest |claimed - true| over all phases; true are the payload's
    weighed fractions, or else the refined ones. F = 0 without claims.

    The payload is `measured_payload`'s (measured_payload.py says what it may hold), the grammar is that of
    measured_answers.py. A structure must match a candidate (pymatgen's StructureMatcher, so that supercells and other
    settings are the same phase), and it is the candidate that is refined: coordinates fitted to the pattern earn
    nothing. More than 5 phases, a phase twice, also as another setting, and a foreign one are refused; what cannot be
    parsed, or would cost far more than a refinement should, is `invalid`. Where a candidate of the same structure type
    and cell, with elements that the sample may hold, fits better in place of a phase, the phase earns nothing.
    """

    name: ClassVar[str] = "measured"
    version: ClassVar[str] = "measured-2"
    fidelity: ClassVar[Fidelity] = "full"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 2.0
    canonical_form: ClassVar[Form] = "own"

    def __init__(self, python: Path | None = None, patterns: Path | None = None, warm: Path | None = None) -> None:
        """`python` has ObjCryst++ (None: the system's); `patterns` is the folder whose files payloads may name; the
        structures of the folder `warm` are read by `prepare`, so that children need not."""
        self.python = python
        self.patterns = patterns
        self.warm = warm

    def prepare(self) -> None:
        import pymatgen.analysis.diffraction.xrd
        import pymatgen.analysis.structure_matcher
        import pymatgen.io.cif  # noqa: F401

        self.python = self.python or system_python()
        if self.warm is not None:
            with suppress(OSError):  # payloads bring their candidates
                read_folder(self.warm)

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        """Sorted names with their claims; a structure as CIF stands for itself."""
        del payload
        try:
            parsed = parse_measured_answer(answer)
        except InvalidAnswer:
            return None
        return None if parsed.is_cif else parsed.words

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        asked = parse_measured_payload(payload, self.patterns)
        known: dict[frozenset[str], Verdict] = {}
        return [
            self._grade(asked, answer if isinstance(answer, str) else " ".join(answer), known)
            for answer in progress.tracked(answers)
        ]

    def _grade(self, asked: MeasuredPayload, text: str, known: dict[frozenset[str], Verdict]) -> Grade:
        try:
            answer = parse_measured_answer(text)
            names = [_matching(each, asked.candidates) for each in answer.phases] if answer.is_cif else answer.phases
            if refusal := _refusal(names, asked):
                return Grade("scored", 0.0, {"gate": refusal})
            verdict = self._judged(asked, names, known)
        except (InvalidAnswer, RefinementRefused) as error:
            return Grade("invalid", 0.0, {"reason": str(error)})
        return _graded(asked, names, answer, verdict)

    def _judged(self, asked: MeasuredPayload, names: Sequence[str], known: dict[frozenset[str], Verdict]) -> Verdict:
        """The verdict on a set, or that another set of the same types is the better one."""
        verdict = self._refined(asked, names, known)
        for name, rival in () if verdict.gate else rivals(names, asked):
            try:
                swapped = self._refined(asked, [rival if each == name else each for each in names], known)
            except VerificationError:  # what cannot be refined is no better
                continue
            if not swapped.gate and swapped.cost < verdict.cost - RIVAL_MARGIN:
                return Verdict(f"{name}: {rival} of the same structure type fits better", verdict.fit)
        return verdict

    def _refined(self, asked: MeasuredPayload, names: Sequence[str], known: dict[frozenset[str], Verdict]) -> Verdict:
        key = frozenset(names)
        if key not in known:
            chosen = [asked.candidates[name].candidate for name in sorted(key)]
            fit = refine(asked.profile, chosen, MEASURED_OPTIONS, self.python)
            known[key] = judge(fit, MEASURED_OPTIONS.cell_limit)
        return known[key]


def _graded(asked: MeasuredPayload, names: Sequence[str], answer: MeasuredAnswer, verdict: Verdict) -> Grade:
    detail: dict[str, Any] = {"gate": verdict.gate, "accepted": verdict.accepted, **fit_detail(verdict.fit)}
    detail |= {"score": round(verdict.score, 4), "fractions": 0.0}
    if answer.fractions is not None:
        true = asked.weighed or {phase.name: phase.mass_fraction for phase in verdict.fit.phases}
        detail["fractions"] = fraction_score(dict(zip(names, answer.fractions, strict=True)), true)
    right = asked.weighed is None or set(names) == set(asked.weighed)
    detail["exact"] = int(verdict.accepted and right)
    share = 1 - FRACTION_SHARE + FRACTION_SHARE * detail["fractions"]
    return Grade("scored", verdict.score * share, detail)


def fraction_score(claimed: Mapping[str, float], true: Mapping[str, float]) -> float:
    """1 when every mass fraction is within 0.05, 0 when one is off by 0.15 or more; a phase of one side only has 0."""
    worst = max(abs(claimed.get(name, 0.0) - true.get(name, 0.0)) for name in {*claimed, *true})
    return float(np.clip((WRONG_FRACTION - worst) / (WRONG_FRACTION - RIGHT_FRACTION), 0.0, 1.0))


def _matching(block: str, candidates: Mapping[str, Structure]) -> str:
    """Name of the candidate that a CIF shows, "" when it is none; raises InvalidAnswer."""
    try:
        proposed = read_text("proposed", block, poscar=False)
        same = {n: c.primitive for n, c in candidates.items() if c.phase.formula == proposed.phase.formula}
        return call_bounded(_first_match, proposed.primitive, same, cpu_seconds=5)
    except (UnreadableStructure, OverLimit) as error:
        raise InvalidAnswer(f"structure {error}") from error


def _first_match(proposed: Any, candidates: Mapping[str, Any]) -> str:
    from pymatgen.analysis.structure_matcher import StructureMatcher

    matcher = StructureMatcher()
    return next((name for name, structure in candidates.items() if matcher.fit(proposed, structure)), "")


def _refusal(names: Sequence[str], asked: MeasuredPayload) -> str:
    """Why an answer is not worth a refinement; empty when it is."""
    if len(names) > MAX_PHASES:
        return f"more than {MAX_PHASES} phases"
    if any(name not in asked.candidates for name in names):
        return "a phase that is no candidate"
    chosen = [asked.candidates[name] for name in names]
    if not all(asked.allows(each) for each in chosen):
        return "an element that is not in the sample"
    return next((reason for pair in combinations(chosen, 2) if (reason := clash(*pair))), "")


def clash(one: Structure, other: Structure) -> str:
    """Why no refinement can tell two phases apart; empty when one can.

    They are the same structure, or of one type with cells that reach each other within the limit of a refinement: then
    the second phase only mends the shape of the peaks of the first.
    """
    if one.phase.formula == other.phase.formula and _first_match(one.primitive, {"same": other.primitive}):
        return SAME
    return OVERLAP if _overlap(one, other) else ""


def _overlap(one: Structure, other: Structure) -> bool:
    if one.phase.hall != other.phase.hall or sorted(one.phase.multiplicities) != sorted(other.phase.multiplicities):
        return False
    return _cell_distance(one, other) <= 2 * MEASURED_OPTIONS.cell_limit


def _cell_distance(one: Structure, other: Structure) -> float:
    return float(np.abs(np.array(one.candidate.cell) / np.array(other.candidate.cell) - 1).max())


def rivals(names: Sequence[str], asked: MeasuredPayload) -> list[tuple[str, str]]:
    """Phases of a set with candidates of their type and cell that the sample could hold instead, the nearest cells."""
    found = [
        (_cell_distance(asked.candidates[name], other), name, key)
        for name in names
        for key, other in asked.candidates.items()
        if key not in names and other.phase.formula != asked.candidates[name].phase.formula and asked.allows(other)
        if _overlap(asked.candidates[name], other)
    ]
    return [(name, key) for _, name, key in sorted(found)[:MAX_RIVALS]]
