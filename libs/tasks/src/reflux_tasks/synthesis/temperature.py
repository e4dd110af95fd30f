"""Whether a temperature is plausible: a rule of thumb from melting points. Standard library only.

Tammann's rule (R. Merkle, J. Maier, On the Tammann-Rule, Z. Anorg. Allg. Chem. 631, 1163 (2005), discuss it): solids
react at a useful rate from about half to two thirds of a melting point in kelvin. H. Huo et al., Chem. Mater. 34, 7323
(2022), found in text-mined syntheses that heating temperatures of oxides go with the precursors' melting points, too.
A heuristic: the edges of the window below are ours, neither fitted to nor checked against measured syntheses.
"""

from collections.abc import Iterable

from reflux_tasks.synthesis.shelf import PRECURSORS

LOWEST, LOW, HIGH, HIGHEST = 0.35, 0.50, 0.75, 0.95
"""Shares of the mean melting point where plausibility begins, is full, is no longer full, and ends."""


def mean_melting_point(precursors: Iterable[str]) -> float:
    """Kelvin; plain mean over the powders."""
    points = [PRECURSORS[name].melting_kelvin for name in precursors]
    return sum(points) / len(points)


def plausibility(kelvin: float, precursors: Iterable[str]) -> float:
    """1 inside the window, falling linearly to 0 outside of it."""
    share = kelvin / mean_melting_point(precursors)
    rising = (share - LOWEST) / (LOW - LOWEST)
    falling = (HIGHEST - share) / (HIGHEST - HIGH)
    return min(1.0, max(0.0, min(rising, falling)))
