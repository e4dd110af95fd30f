"""Figures of merit of a refinement from its arrays: R values, and how much each phase is needed.

With observed counts yo, calculated yc, and weights w = 1 / max(yo, 1), the inverse Poisson variance:
    R_wp   = sqrt(sum w (yo - yc)^2 / sum w yo^2)
    R_wb   = sqrt(sum w (yo - yc)^2 / sum w (yo - b)^2), b the background estimate of the request (SNIP)
    R_exp  = sqrt((points - parameters) / sum w yo^2), goodness of fit = R_wp / R_exp
    need   = (chi2' without this phase - chi2') / chi2', the scales of the others refitted, all else fixed
chi2' has the weights 1 / (max(yo, 1) + (0.2 s)^2), s the calculated counts above the background: peak shapes and
intensities of a fit are wrong by a share of themselves, which counting statistics do not know. With them needs hardly
depend on the counting time (docs/science-xrd.md).
"""

import math

import numpy as np

MODEL_ERROR = 0.2
"""A share of the peaks; 0.15 to 0.3 makes chi2' equal to the number of points for the true sets of weighed mixtures."""


def chi2(counts: np.ndarray, calculated: np.ndarray, weights: np.ndarray) -> float:
    """Weighted sum of squares [points]."""
    return float((weights * (counts - calculated) ** 2).sum())


def r_values(counts: np.ndarray, calculated: np.ndarray, background: np.ndarray, free: int) -> dict[str, float]:
    """R_wp, R_wb, R_exp and goodness of fit with `free` parameters."""
    weights = 1 / np.maximum(counts, 1)
    misfit, total = chi2(counts, calculated, weights), float((weights * counts**2).sum())
    r_wp, r_exp = math.sqrt(misfit / total), math.sqrt(max(len(counts) - free, 1) / total)
    r_wb = math.sqrt(misfit / max(chi2(counts, background, weights), 1e-300))
    return {"r_wp": r_wp, "r_wb": r_wb, "r_exp": r_exp, "goodness": r_wp / r_exp}


def needs(counts: np.ndarray, calculated: np.ndarray, parts: np.ndarray) -> list[float]:
    """Need of each phase from its part [phases, points] of the calculated pattern [points]."""
    signal = np.maximum(parts.sum(axis=0), 0)
    weights = 1 / (np.maximum(counts, 1) + (MODEL_ERROR * signal) ** 2)
    misfit = max(chi2(counts, calculated, weights), 1e-300)
    found = []
    for left_out in range(len(parts)):
        rest = _refitted(counts, calculated - parts.sum(axis=0), np.delete(parts, left_out, axis=0), weights)
        found.append((chi2(counts, rest, weights) - misfit) / misfit)
    return found


def _refitted(counts: np.ndarray, background: np.ndarray, parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The best pattern of the background and these parts, each times a factor."""
    root = np.sqrt(weights)
    factors = np.linalg.lstsq((parts * root).T, (counts - background) * root, rcond=None)[0]
    return background + factors @ parts
