"""Peak lists of strained, noisy mixtures: the generator of the task's problems. numpy only; about 0.15 ms a pattern."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reflux_tasks.xrd.phases import Phase, line_angles

TWO_THETA_MIN_DEGREES = 10.0
TWO_THETA_MAX_DEGREES = 90.0
MAX_PEAKS = 12
MERGE_DEGREES = 0.15
MIN_INTENSITY = 0.02
MIN_SECOND_INTENSITY = 0.35
"""Strongest line of the second phase against that of the first, at least; at most 1."""

LevelName = Literal["clean", "light", "noisy"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """How far a measured pattern is from the ideal one."""

    strain: float = 0.0
    """Largest relative isotropic strain, uniform in +-strain."""
    anisotropy: float = 0.0
    """Largest further relative strain per axis; the crystal system is respected."""
    zero_shift_degrees: float = 0.0
    jitter: float = 0.0
    """Sigma of the lognormal factor on each line (texture, statistics)."""
    dropped: float = 0.0
    """Probability that a line is lost."""
    max_spurious: int = 0
    """Largest number of foreign peaks."""


LEVELS: dict[LevelName, Level] = {
    "clean": Level(),
    "light": Level(strain=0.003, zero_shift_degrees=0.03, jitter=0.15, dropped=0.03),
    "noisy": Level(strain=0.01, anisotropy=0.003, zero_shift_degrees=0.1, jitter=0.35, dropped=0.12, max_spurious=1),
}


@dataclass(frozen=True)
class Pattern:
    """Strongest peaks of one sample by falling intensity, and what made them."""

    two_theta: np.ndarray
    """Degrees [peaks]."""
    intensity: np.ndarray
    """[peaks], the strongest is 1."""
    cell_scales: np.ndarray
    """Lengths of the strained lattice vectors over the ideal ones [phases, 3]."""
    shares: np.ndarray
    """Strongest line of each phase over that of the first [phases]."""
    zero_shift_degrees: float


def make_pattern(phases: Sequence[Phase], level: Level, rng: np.random.Generator) -> Pattern:
    """Draws one pattern of a mixture whose first phase has the strongest line."""
    scales = np.stack([_cell_scale(phase.system, level, rng) for phase in phases])
    shares = np.array([1.0] + [rng.uniform(MIN_SECOND_INTENSITY, 1.0) for _ in phases[1:]])
    angles, heights = [], []
    for phase, scale, share in zip(phases, scales, shares, strict=True):
        angle, height = _lines(phase, scale, level, rng)
        angles.append(angle)
        heights.append(share * height / max(height.max(initial=0.0), 1e-9))
    zero_shift = level.zero_shift_degrees * float(rng.uniform(-1.0, 1.0))
    two_theta, intensity = np.concatenate(angles) + zero_shift, np.concatenate(heights)
    two_theta, intensity = _lose_and_add(two_theta, intensity, level, rng)
    two_theta, intensity = merge_peaks(two_theta, intensity)
    strongest = np.argsort(-intensity, kind="stable")[:MAX_PEAKS]
    intensity = intensity[strongest] / intensity.max(initial=1e-9)
    return Pattern(two_theta[strongest], intensity, scales, shares, zero_shift)


def _cell_scale(system: str, level: Level, rng: np.random.Generator) -> np.ndarray:
    isotropic = rng.uniform(-level.strain, level.strain)
    axes = rng.uniform(-level.anisotropy, level.anisotropy, 3)
    if system == "cubic":
        axes[:] = 0.0
    elif system in ("tetragonal", "hexagonal", "trigonal"):
        axes[1] = axes[0]
    return 1.0 + isotropic + axes


def _lines(phase: Phase, scale: np.ndarray, level: Level, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    hkl, intensity = phase.strongest
    two_theta = line_angles(phase.lattice * scale[:, None], hkl)
    reached = ~np.isnan(two_theta)
    two_theta, intensity = two_theta[reached], intensity[reached]
    if level.jitter:
        intensity = intensity * np.exp(rng.normal(0.0, level.jitter, len(intensity)))
    return two_theta, intensity


def _lose_and_add(
    two_theta: np.ndarray, intensity: np.ndarray, level: Level, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    if level.dropped:
        kept = rng.random(len(two_theta)) > level.dropped
        if kept.any():  # a pattern without a peak would be no problem at all
            two_theta, intensity = two_theta[kept], intensity[kept]
    if level.max_spurious:
        count = int(rng.integers(0, level.max_spurious + 1))
        two_theta = np.append(two_theta, rng.uniform(15.0, 88.0, count))
        intensity = np.append(intensity, rng.uniform(0.05, 0.25, count))
    seen = (two_theta > TWO_THETA_MIN_DEGREES) & (two_theta < TWO_THETA_MAX_DEGREES) & (intensity > MIN_INTENSITY)
    return two_theta[seen], intensity[seen]


def merge_peaks(two_theta: np.ndarray, intensity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins peaks closer than 0.15 degrees to their neighbour into one at their mean; sorted by angle."""
    order = np.argsort(two_theta)
    two_theta, intensity = two_theta[order], intensity[order]
    if len(two_theta) < 2:
        return two_theta, intensity
    group = np.concatenate([[0], np.cumsum(np.diff(two_theta) > MERGE_DEGREES)])
    summed = np.bincount(group, intensity)
    return np.bincount(group, intensity * two_theta) / summed, summed
