"""Starting cells for a refinement: stretches a phase's axes until its lines lie on the observed peaks."""

from itertools import product

import numpy as np

from reflux_tasks.xrd.phases import WAVELENGTH_ANGSTROM, Phase
from reflux_tasks.xrd.profile import Profile

MAX_STRAIN = 0.014
"""Reach of the search on each axis; the noisy level strains by 0.013 at most."""
_ISOTROPIC_STEP = 0.0005
_AXIS_REACH, _AXIS_STEP = 0.007, 0.0005
_ROUNDS = 2
_COARSE_DEGREES, _FINE_DEGREES = 0.15, 0.06
_SHIFTS_DEGREES = np.arange(-0.10, 0.11, 0.05)
_NUM_LINES = 40
_PEAK_SIGMA_DEGREES = 0.09
"""Sigma of the square root of a peak of 0.15 degrees full width."""


def align(profile: Profile, background: np.ndarray, phase: Phase) -> np.ndarray:
    """Stretch [3] of the lattice vectors that puts the most of the square root of the counts under the phase's lines.

    A Rietveld refinement is a local search: it needs peaks that overlap, and one per cent of strain moves lines by
    several widths. Axes that symmetry makes equal stay equal. About 10 ms.
    """
    height = np.sqrt(np.maximum(profile.counts - background, 0.0))
    coarse, fine = (_Smoothed(profile, height, sigma) for sigma in (_COARSE_DEGREES, _FINE_DEGREES))
    groups = independent_axes(phase.system)
    steps = np.arange(-MAX_STRAIN, MAX_STRAIN + 1e-9, _ISOTROPIC_STEP)
    best = _best(coarse, phase, 1.0 + steps[:, None] * np.ones(3))
    if len(groups) > 1:
        best = _search_axes(coarse, phase, best, groups)
    return _search_axes(fine, phase, best, groups)


def independent_axes(system: str) -> list[list[int]]:
    """Groups of lattice vectors that symmetry keeps equally long."""
    if system == "cubic":
        return [[0, 1, 2]]
    if system in ("tetragonal", "hexagonal", "trigonal"):
        return [[0, 1], [2]]
    return [[0], [1], [2]]


class _Smoothed:
    """Square roots of the counts after a Gaussian filter, read at any angle."""

    def __init__(self, profile: Profile, height: np.ndarray, sigma_degrees: float) -> None:
        sigma = sigma_degrees / profile.step_degrees
        half = int(np.ceil(3 * sigma))
        kernel = np.exp(-0.5 * (np.arange(-half, half + 1) / sigma) ** 2)
        self.two_theta = profile.two_theta
        self.values = np.convolve(height, kernel / kernel.sum(), "same")
        self.peak_sigma_degrees = float(np.hypot(sigma_degrees, _PEAK_SIGMA_DEGREES))

    def at(self, two_theta: np.ndarray) -> np.ndarray:
        return np.interp(two_theta, self.two_theta, self.values, left=0.0, right=0.0)


def _search_axes(height: _Smoothed, phase: Phase, start: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    reach = np.arange(-_AXIS_REACH, _AXIS_REACH + 1e-9, _AXIS_STEP)
    best = start
    for _, group in product(range(_ROUNDS), groups):
        trials = np.repeat(best[None], len(reach), axis=0)
        trials[:, group] = np.clip(trials[:, group] + reach[:, None], 1 - MAX_STRAIN, 1 + MAX_STRAIN)
        best = _best(height, phase, trials)
    return best


def _best(height: _Smoothed, phase: Phase, scales: np.ndarray) -> np.ndarray:
    """The stretch of `scales` [trials, 3] whose lines correlate best with the profile, over all angle shifts.

    The norm of the simulated pattern divides the overlap: lines that fall together would count their peak twice else,
    and superstructures would be pressed into their parent cell.
    """
    chosen = np.argsort(-phase.intensity, kind="stable")[:_NUM_LINES]
    weights = np.sqrt(phase.intensity[chosen])
    stretched = phase.hkl[chosen][None] / scales[:, None, :]
    sine = np.linalg.norm(stretched @ np.linalg.inv(phase.lattice).T, axis=2) * WAVELENGTH_ANGSTROM / 2
    two_theta = 2 * np.degrees(np.arcsin(np.minimum(sine, 1.0)))
    overlap = (height.at(two_theta[None] + _SHIFTS_DEGREES[:, None, None]) * weights).sum(axis=2).max(axis=0)
    apart = (two_theta[:, :, None] - two_theta[:, None, :]) / (2 * height.peak_sigma_degrees)
    norm = np.sqrt(np.einsum("tij,i,j->t", np.exp(-(apart**2)), weights, weights))
    return scales[np.argmax(overlap / norm)]
