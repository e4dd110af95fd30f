"""Answers about a measured pattern: phases by name or as CIF, each with the mass fraction that is claimed for it.

    answer   = phase { "<sep>" phase } "<eos>" { "<pad>" }        phase = name [ fraction ]
    fraction = decimal from 0 to 1; all phases have one or none has, and they add up to 1 within 0.05

or blocks of CIF, a structure each, whose fractions are their `_pd_phase_mass_%` (powder dictionary of the IUCr).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reflux_tasks.canonical import END, PAD, SEPARATOR
from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.refinement import MAX_PHASES

MAX_ANSWER_CHARACTERS = 200_000
SUM_TOLERANCE = 0.05
_BLOCK = re.compile(r"^[ \t]*data_", re.MULTILINE | re.IGNORECASE)
_DECIMAL = re.compile(r"[01]|[01]?\.[0-9]{1,6}")
_MASS_PERCENT = re.compile(r"^[ \t]*_pd_phase_mass_%[ \t]+([0-9]{1,3}(?:\.[0-9]{1,6})?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class MeasuredAnswer:
    """Phases in the order of an answer, repetitions kept; names, or the texts of CIF blocks."""

    phases: tuple[str, ...]
    fractions: tuple[float, ...] | None
    """Claimed mass fractions, None when none are."""
    is_cif: bool

    @property
    def words(self) -> str:
        """The same answer by sorted names; every order of its phases gives these words."""
        claims = self.fractions or (None,) * len(self.phases)
        parts = [
            name if claim is None else f"{name} {_decimal(claim)}"
            for name, claim in zip(self.phases, claims, strict=True)
        ]
        return f" {SEPARATOR} ".join(sorted(parts)) + f" {END}"


def _decimal(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def parse_measured_answer(answer: str) -> MeasuredAnswer:
    """Raises InvalidAnswer with the reason."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise InvalidAnswer(f"{len(answer)} characters, at most {MAX_ANSWER_CHARACTERS} are read")
    _, *blocks = _BLOCK.split(answer)
    if len(blocks) > MAX_PHASES:
        raise InvalidAnswer(f"more than {MAX_PHASES} structures")
    if blocks:
        percents = [_MASS_PERCENT.findall(block) for block in blocks]
        if any(len(found) > 1 for found in percents):
            raise InvalidAnswer("a structure with two mass fractions")
        claims = [float(found[0]) / 100 if found else None for found in percents]
        return MeasuredAnswer(tuple("data_" + block for block in blocks), _fractions(claims), is_cif=True)
    body, end, rest = answer.partition(END)
    if not end or rest.replace(PAD, "").strip():
        raise InvalidAnswer(f"no {END}, or words after it")
    parts = [_name_and_claim(part.split()) for part in body.split(SEPARATOR)]
    return MeasuredAnswer(tuple(name for name, _ in parts), _fractions([claim for _, claim in parts]), is_cif=False)


def _name_and_claim(words: list[str]) -> tuple[str, float | None]:
    claim = float(words.pop()) if len(words) > 1 and _DECIMAL.fullmatch(words[-1]) else None
    if not words:
        raise InvalidAnswer("a phase without a name")
    return " ".join(words), claim


def _fractions(claims: Sequence[float | None]) -> tuple[float, ...] | None:
    given = [claim for claim in claims if claim is not None]
    if not given:
        return None
    if len(given) < len(claims):
        raise InvalidAnswer(f"mass fractions for {len(given)} of {len(claims)} phases: all or none")
    if max(given) > 1 or abs(sum(given) - 1) > SUM_TOLERANCE:
        raise InvalidAnswer(f"the mass fractions add up to {sum(given):.3g}, not to 1")
    return tuple(given)
