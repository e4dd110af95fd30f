"""Figures of a set of recipes: no benchmark of this field is settled, so these are our own."""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_tasks.verify import Grade


@dataclass(frozen=True)
class SynthesisFigures:
    """Means over prompts; each prompt has n answers, the first one is the answer."""

    balanced: float
    """Share of first answers that are a balanced reaction of available precursors."""
    downhill: float
    """Share of first answers whose free energy is below zero; those that are not balanced count as misses."""
    selective: float
    """Share of first answers that beat every other phase of the same precursors."""
    balanced_at_n: float
    """Share of prompts of which any answer is balanced."""


def synthesis_figures(groups: Sequence[Sequence[Grade]]) -> SynthesisFigures:
    """Figures from the grades of `full`, one group of answers per prompt; raises ValueError for nothing to average."""
    if not groups or not all(groups):
        raise ValueError("figures need at least one prompt, and an answer for each")
    first = [group[0] for group in groups]
    count = len(groups)
    return SynthesisFigures(
        balanced=sum(map(_balanced, first)) / count,
        downhill=sum(_balanced(grade) and grade.detail["energy_ev_per_atom"] < 0 for grade in first) / count,
        selective=sum(_balanced(grade) and grade.detail["margin_ev_per_atom"] > 0 for grade in first) / count,
        balanced_at_n=sum(any(map(_balanced, group)) for group in groups) / count,
    )


def _balanced(grade: Grade) -> bool:
    return grade.outcome == "scored" and "energy_ev_per_atom" in grade.detail
