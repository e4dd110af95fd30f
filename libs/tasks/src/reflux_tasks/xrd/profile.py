"""Powder profiles: pseudo-Voigt peaks of the Cu K-alpha doublet, background estimate, and a simulated measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux_tasks.xrd.phases import WAVELENGTH_ANGSTROM, Phase

KALPHA_ANGSTROM = (1.540562, 1.544398)
KALPHA_WEIGHTS = (1.0, 0.5)
TAIL_WIDTHS = 25.0
"""Peaks end this many full widths from their centre."""


@dataclass(frozen=True)
class Profile:
    """Counts over an even grid of angles."""

    two_theta: np.ndarray
    """Degrees [points], rising evenly."""
    counts: np.ndarray
    """Photons [points]."""

    @property
    def step_degrees(self) -> float:
        return float(self.two_theta[1] - self.two_theta[0])


def snip_background(profile: Profile, window_degrees: float = 1.2) -> np.ndarray:
    """Background [points]: repeated clipping of doubly logarithmic counts against their neighbours' mean, then a mean.

    Source: C. G. Ryan et al., Nucl. Instrum. Methods B 34, 396 (1988).
    """
    widest = max(1, int(window_degrees / profile.step_degrees))
    # mirrored ends: a peak that the range cuts would pass for background otherwise
    levels = np.pad(np.log(np.log(np.maximum(profile.counts, 0) + 1) + 1), widest, "reflect")
    for width in range(widest, 0, -max(1, widest // 24)):
        clipped = levels.copy()
        clipped[width:-width] = np.minimum(levels[width:-width], (levels[2 * width :] + levels[: -2 * width]) / 2)
        levels = clipped
    levels = levels[widest:-widest]
    half = max(3, int(0.4 / profile.step_degrees))
    kernel = np.ones(2 * half + 1) / (2 * half + 1)
    return np.convolve(np.pad(np.exp(np.exp(levels) - 1) - 1, half, "edge"), kernel, "valid")


def strained_lines(phase: Phase, cell_scale: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1/(2d) [lines] in 1/angstrom and intensities [lines] of a phase with stretched lattice vectors.

    Intensities follow the Lorentz-polarisation factor of the new angles; the change of the form factors is neglected.
    """
    scale = np.asarray(cell_scale, float)[:, None]
    ideal = np.linalg.norm(phase.hkl @ np.linalg.inv(phase.lattice).T, axis=1) / 2
    strained = np.linalg.norm(phase.hkl @ np.linalg.inv(phase.lattice * scale).T, axis=1) / 2
    reached = strained * KALPHA_ANGSTROM[1] < 0.999
    ideal, strained = ideal[reached], strained[reached]
    factor = lorentz_polarisation(strained) / lorentz_polarisation(np.minimum(ideal, 0.999 / WAVELENGTH_ANGSTROM))
    return strained, phase.intensity[reached] * factor


def lorentz_polarisation(inverse_2d: np.ndarray) -> np.ndarray:
    """(1 + cos^2 2theta) / (sin^2 theta cos theta) at the mean wavelength; no monochromator."""
    sine = inverse_2d * WAVELENGTH_ANGSTROM
    cosine = np.sqrt(1 - sine**2)
    return (1 + (1 - 2 * sine**2) ** 2) / (sine**2 * cosine)


def pseudo_voigt_sum(
    two_theta: np.ndarray,
    inverse_2d: np.ndarray,
    intensity: np.ndarray,
    *,
    widths: np.ndarray,
    eta: float,
    zero_shift: float | np.ndarray = 0.0,
) -> np.ndarray:
    """Profile [points] of lines 1/(2d) [lines] with full widths [lines] in degrees; each line has area `intensity`.

    `zero_shift` in degrees, one for all lines or one each.
    """
    total = np.zeros_like(two_theta)
    for wavelength, weight in zip(KALPHA_ANGSTROM, KALPHA_WEIGHTS, strict=True):
        centres = 2 * np.degrees(np.arcsin(inverse_2d * wavelength)) + zero_shift
        areas = intensity * weight / sum(KALPHA_WEIGHTS)
        starts = np.searchsorted(two_theta, centres - TAIL_WIDTHS * widths)
        stops = np.searchsorted(two_theta, centres + TAIL_WIDTHS * widths)
        for centre, area, width, start, stop in zip(centres, areas, widths, starts, stops, strict=True):
            total[start:stop] += area * _pseudo_voigt(two_theta[start:stop] - centre, width, eta)
    return total


def _pseudo_voigt(distance: np.ndarray, width: float, eta: float) -> np.ndarray:
    """Unit area up to the cut tails: eta times Lorentz plus (1 - eta) times Gauss, both of this full width."""
    square = (2 * distance / width) ** 2
    lorentz = 2 / (np.pi * width) / (1 + square)
    gauss = 2 * np.sqrt(np.log(2) / np.pi) / width * np.exp(-np.log(2) * square)
    return eta * lorentz + (1 - eta) * gauss
