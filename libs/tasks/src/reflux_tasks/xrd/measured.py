"""The verifier for a laboratory's own pattern: phase sets out of its own structures, by Rietveld refinement."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier
from reflux_tasks.xrd.answers import END, PAD, SEPARATOR, InvalidAnswer
from reflux_tasks.xrd.bounded import OverLimit, call_bounded
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.readers import checked, cut_and_rebin, read_pattern
from reflux_tasks.xrd.refinement import MAX_PHASES, RefinementOptions, RefinementRefused, refine, system_python
from reflux_tasks.xrd.structure_files import Structure, UnreadableStructure, read_folder, read_text
from reflux_tasks.xrd.verdict import fit_detail, judge

LOW_DEGREES, HIGH_DEGREES = 13.0, 90.0
MAX_POINTS = 4000
"""Scans with more points are rebinned."""
MAX_ANSWER_CHARACTERS = 200_000
MAX_CANDIDATES = 200
SAME = "a phase twice"
_BLOCK = re.compile(r"^[ \t]*data_", re.MULTILINE | re.IGNORECASE)
MEASURED_OPTIONS = RefinementOptions()
"""The recipe for measured patterns: Cu K-alpha, sample displacement, cells within 1.2 %."""


def prepare(profile: Profile) -> Profile:
    """The part of a scan that is refined: 13 to 90 degrees, neighbours summed to at most 4000 points."""
    return cut_and_rebin(profile, LOW_DEGREES, HIGH_DEGREES, MAX_POINTS)


def measured_payload(pattern: Path, candidates: Path) -> dict[str, Any]:
    """The verifier's payload for a pattern and a folder of CIF files (at most 200), which become the candidates.

    Raises UnreadablePattern, FileNotFoundError, or ValueError when no structure can be used.
    """
    profile = prepare(read_pattern(pattern))
    usable, refused = read_folder(candidates)
    if not usable:
        raise ValueError(f"{candidates}: no usable structure: {'; '.join(list(refused.values())[:3])}")
    return {
        "pattern": pattern.name,
        "two_theta_degrees": profile.two_theta.round(6).tolist(),
        "counts": profile.counts.round(3).tolist(),
        "candidates": {name: structure.text for name, structure in usable.items()},
    }


class MeasuredVerifier(Verifier):
    """Reward of a phase set on a measured pattern, as `verdict.py` defines it: gate * clip((0.45 - cost) / 0.30, 0, 1).

    The payload is `measured_payload`'s: counts over two-theta, and the texts of the candidate structures by name;
    optionally `elements`, those that the sample may hold. An answer names candidates, `ZnO <sep> V2O5 <eos>`, or gives
    their structures as blocks of CIF. A structure must match a candidate (pymatgen's StructureMatcher, so that
    supercells and other settings are the same phase), and it is the candidate that is refined: coordinates fitted to
    the pattern earn nothing. More than 5 phases, a phase twice, also as another setting, and a foreign one are
    refused; what cannot be parsed, or would cost far more than a refinement should, is `invalid`.
    """

    name: ClassVar[str] = "measured"
    version: ClassVar[str] = "measured-1"
    fidelity: ClassVar[Fidelity] = "full"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 1.0
    canonical_form: ClassVar[Form] = "exact"

    def __init__(self, python: Path | None = None) -> None:
        self.python = python
        self._read: dict[str, Structure] = {}

    def prepare(self) -> None:
        import pymatgen.analysis.structure_matcher  # noqa: F401

        self.python = self.python or system_python()

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        profile, candidates, elements = self._parse_payload(payload)
        known: dict[frozenset[str], Grade] = {}
        grades = []
        for answer in answers:
            try:
                names = _named(answer if isinstance(answer, str) else " ".join(answer), candidates)
                refusal = _refusal(names, candidates, elements)
                key = frozenset(names)
                if not refusal and key not in known:
                    known[key] = self._refined(profile, [candidates[name] for name in sorted(key)])
                grades.append(Grade("scored", 0.0, {"gate": refusal}) if refusal else known[key])
            except (InvalidAnswer, RefinementRefused) as error:
                grades.append(Grade("invalid", 0.0, {"reason": str(error)}))
        return grades

    def _refined(self, profile: Profile, structures: Sequence[Structure]) -> Grade:
        fit = refine(profile, [structure.candidate for structure in structures], MEASURED_OPTIONS, self.python)
        verdict = judge(fit, MEASURED_OPTIONS.cell_limit)
        detail = {"gate": verdict.gate, "accepted": verdict.accepted, **fit_detail(fit)}
        return Grade("scored", verdict.score, detail)

    def _parse_payload(self, payload: Mapping[str, Any]) -> tuple[Profile, dict[str, Structure], frozenset[str] | None]:
        try:
            profile = checked("pattern", *(np.array(payload[key], float) for key in ("two_theta_degrees", "counts")))
            texts = {str(name): str(text) for name, text in payload["candidates"].items()}
            elements = frozenset(payload["elements"]) if "elements" in payload else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a payload of this verifier: {error!r}") from error
        if not 1 <= len(texts) <= MAX_CANDIDATES:
            raise ValueError(
                f"not a payload of this verifier: {len(texts)} candidates, 1 to {MAX_CANDIDATES} are allowed"
            )
        return profile, {name: self._structure(name, text) for name, text in texts.items()}, elements

    def _structure(self, name: str, text: str) -> Structure:
        """Parsed once per verifier: the groups of a run share their candidates."""
        if text not in self._read:
            if len(self._read) >= MAX_CANDIDATES:
                self._read.clear()
            self._read[text] = read_text(name, text)
        return self._read[text].under(name)


def _named(answer: str, candidates: Mapping[str, Structure]) -> list[str]:
    """Names in the order of an answer, repetitions kept, "" for a structure that is no candidate; InvalidAnswer."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise InvalidAnswer(f"{len(answer)} characters, at most {MAX_ANSWER_CHARACTERS} are read")
    _, *blocks = _BLOCK.split(answer)
    if len(blocks) > MAX_PHASES:
        raise InvalidAnswer(f"more than {MAX_PHASES} structures")
    if blocks:
        return [_matching(block, candidates) for block in blocks]
    body, end, rest = answer.partition(END)
    if not end or rest.replace(PAD, "").strip():
        raise InvalidAnswer(f"no {END}, or words after it")
    names = [name.strip() for name in body.split(SEPARATOR)]
    if not all(names):
        raise InvalidAnswer("a phase without a name")
    return names


def _matching(block: str, candidates: Mapping[str, Structure]) -> str:
    try:
        proposed = read_text("proposed", "data_" + block, poscar=False)
        same = {n: c.primitive for n, c in candidates.items() if c.phase.formula == proposed.phase.formula}
        return call_bounded(_first_match, proposed.primitive, same, cpu_seconds=5)
    except (UnreadableStructure, OverLimit) as error:
        raise InvalidAnswer(f"structure {error}") from error


def _first_match(proposed: Any, candidates: Mapping[str, Any]) -> str:
    from pymatgen.analysis.structure_matcher import StructureMatcher

    matcher = StructureMatcher()
    return next((name for name, structure in candidates.items() if matcher.fit(proposed, structure)), "")


def _refusal(names: Sequence[str], candidates: Mapping[str, Structure], elements: frozenset[str] | None) -> str:
    """Why an answer is not worth a refinement; empty when it is."""
    if len(names) > MAX_PHASES:
        return f"more than {MAX_PHASES} phases"
    if len(set(names)) < len(names):
        return SAME
    if any(name not in candidates for name in names):
        return "a phase that is no candidate"
    chosen = [candidates[name] for name in names]
    if elements is not None and any(not set(each.phase.elements) <= elements for each in chosen):
        return "an element that is not in the sample"
    return next((reason for pair in combinations(chosen, 2) if (reason := clash(*pair))), "")


def clash(one: Structure, other: Structure) -> str:
    """Why no refinement can tell two phases apart; empty when one can.

    They are the same structure, or of one type with cells that reach each other within the limit of a refinement: then
    the second phase only mends the shape of the peaks of the first.
    """
    if one.phase.formula == other.phase.formula and _first_match(one.primitive, {"same": other.primitive}):
        return SAME
    if one.phase.hall == other.phase.hall and sorted(one.phase.multiplicities) == sorted(other.phase.multiplicities):
        ratios = np.array(one.candidate.cell) / np.array(other.candidate.cell)
        if np.abs(ratios - 1).max() <= 2 * MEASURED_OPTIONS.cell_limit:
            return "two phases of one structure type whose lines overlap"
    return ""
