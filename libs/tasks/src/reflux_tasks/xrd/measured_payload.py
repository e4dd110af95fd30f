"""The payload of the verifier of measured patterns: made from files, parsed from JSON.

    two_theta_degrees, counts   the scan, cut and rebinned; or pattern_file and sha256, a file of the folder of patterns
    candidates                  texts of the candidate structures (CIF) by name; those that ship when left out
    elements                    optional: those that the sample may hold
    weighed                     optional: true mass fractions by candidate, for claimed ones

A file is named with the hash of its bytes, because equal payloads mean equal grades for ever.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.readers import checked, cut_and_rebin, read_pattern
from reflux_tasks.xrd.refinement import RefinementOptions
from reflux_tasks.xrd.structure_files import SHIPPED, Structure, read_folder, read_text

LOW_DEGREES, HIGH_DEGREES = 13.0, 90.0
MAX_POINTS = 4000
"""Scans with more points are rebinned."""
MAX_CANDIDATES = 200
MEASURED_OPTIONS = RefinementOptions()
"""The recipe for measured patterns: Cu K-alpha, sample displacement, cells within 1.2 %."""


@dataclass(frozen=True)
class MeasuredPayload:
    """A parsed payload."""

    profile: Profile
    candidates: Mapping[str, Structure]
    elements: frozenset[str] | None
    """None when any may be there."""
    weighed: Mapping[str, float] | None

    def allows(self, structure: Structure) -> bool:
        """Whether the sample may hold all elements of a structure."""
        return self.elements is None or self.elements.issuperset(structure.phase.elements)


def prepare(profile: Profile) -> Profile:
    """The part of a scan that is refined: 13 to 90 degrees, neighbours summed to at most 4000 points."""
    return cut_and_rebin(profile, LOW_DEGREES, HIGH_DEGREES, MAX_POINTS)


def measured_payload(
    pattern: Path,
    candidates: Path,
    elements: Iterable[str] | None = None,
    weighed: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The payload for a pattern and a folder of CIF files (at most 200), which become the candidates.

    Raises UnreadablePattern, FileNotFoundError, or ValueError when no structure can be used.
    """
    profile = prepare(read_pattern(pattern))
    usable, refused = read_folder(candidates)
    if not usable:
        raise ValueError(f"{candidates}: no usable structure: {'; '.join(list(refused.values())[:3])}")
    payload: dict[str, Any] = {
        "pattern": pattern.name,
        "two_theta_degrees": profile.two_theta.round(6).tolist(),
        "counts": profile.counts.round(3).tolist(),
        "candidates": {name: structure.text for name, structure in usable.items()},
    }
    if elements is not None:
        payload["elements"] = sorted(elements)
    if weighed is not None:
        payload["weighed"] = dict(weighed)
    return payload


def named_payload(pattern: Path) -> dict[str, Any]:
    """Part of a payload that names a file of the folder of patterns and the hash of its bytes."""
    return {"pattern_file": pattern.name, "sha256": hashlib.sha256(pattern.read_bytes()).hexdigest()}


def parse_measured_payload(payload: Mapping[str, Any], folder: Path | None) -> MeasuredPayload:
    """Raises ValueError for anything that is no payload of this verifier."""
    try:
        profile = _named(payload, folder) if "pattern_file" in payload else _inline(payload)
        texts = {str(name): str(text) for name, text in payload.get("candidates", _shipped()).items()}
        elements = frozenset(_symbols(payload["elements"])) if "elements" in payload else None
        weighed = {str(name): float(value) for name, value in payload.get("weighed", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise ValueError(f"not a payload of this verifier: {error!r}") from error
    if not 1 <= len(texts) <= MAX_CANDIDATES:
        raise ValueError(f"not a payload of this verifier: {len(texts)} candidates, 1 to {MAX_CANDIDATES} are allowed")
    if weighed and not (
        set(weighed) <= set(texts) and min(weighed.values()) >= 0 and 0.9 <= sum(weighed.values()) <= 1.1
    ):
        raise ValueError("not a payload of this verifier: weighed fractions of candidates must add up to 1")
    return MeasuredPayload(
        profile, {name: read_text(name, text) for name, text in texts.items()}, elements, weighed or None
    )


def _symbols(elements: Any) -> list[str]:
    if not isinstance(elements, list) or not all(isinstance(symbol, str) for symbol in elements):
        raise ValueError("elements must be a list of symbols")
    return elements


def _inline(payload: Mapping[str, Any]) -> Profile:
    return checked("pattern", *(np.array(payload[key], float) for key in ("two_theta_degrees", "counts")))


def _named(payload: Mapping[str, Any], folder: Path | None) -> Profile:
    name = str(payload["pattern_file"])
    if folder is None or Path(name).name != name or not (folder / name).is_file():
        raise ValueError(f"no pattern {name!r} in {folder or 'a folder of patterns'}")
    profile = read_pattern(folder / name)  # first: it bounds the size
    if hashlib.sha256((folder / name).read_bytes()).hexdigest() != payload["sha256"]:
        raise ValueError(f"the pattern {name} is not the one that was meant: its sha256 differs")
    return prepare(profile)


def _shipped() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(SHIPPED.glob("*.cif"))}
