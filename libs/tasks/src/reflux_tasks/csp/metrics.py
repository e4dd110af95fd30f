"""Figures of a set of graded answers, as the benchmarks of crystal structure prediction define them.

T. Xie et al., CDVAE (arXiv 2110.06197); R. Jiao et al., DiffCSP (arXiv 2309.04475); L. M. Antunes et al., CrystaLLM
(Nat. Commun. 15, 10570 (2024)).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reflux_tasks.verify import Grade


@dataclass(frozen=True)
class CspFigures:
    """Means over prompts; each prompt has n answers."""

    match_rate: float
    """Share of all first answers that match; what is invalid is a miss."""
    match_at_n: float
    """Share of prompts of which any answer matches."""
    rmse: float | None
    """Mean normalised rms distance of the best matched answer, over matched prompts only; None without a match."""
    valid: float
    """Share of all answers that are possible structures."""


def csp_figures(groups: Sequence[Sequence[Grade]]) -> CspFigures:
    """Figures from the grades of `surrogate` (or a dearer verifier), one group of answers per prompt.

    Raises ValueError when there is nothing to average.
    """
    if not groups or not all(groups):
        raise ValueError("figures need at least one prompt, and an answer for each")
    best = [min((rms for grade in group if (rms := _rms(grade)) is not None), default=None) for group in groups]
    matched = [rms for rms in best if rms is not None]
    answers = [grade for group in groups for grade in group]
    return CspFigures(
        match_rate=sum(_rms(group[0]) is not None for group in groups) / len(groups),
        match_at_n=len(matched) / len(groups),
        rmse=sum(matched) / len(matched) if matched else None,
        valid=sum(grade.outcome == "scored" for grade in answers) / len(answers),
    )


def _rms(grade: Grade) -> float | None:
    return grade.detail.get("r_rmse") if grade.outcome == "scored" else None
