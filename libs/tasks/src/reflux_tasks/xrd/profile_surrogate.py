"""The surrogate for measured profiles: simulated patterns mixed by non-negative least squares, and peak F1.

For candidates with patterns p_i(displacement, width) and three smooth background terms, weights w = 1 / max(yo, 1):

    R(set) = min over displacement, width, coefficients of sqrt(sum w (yo - b - sum c_i p_i)^2 / sum w (yo - b)^2)

with c_i >= 0 for patterns. The Gram matrices of all candidates are made once per profile; a set then costs a few small
linear systems, solved for the whole grid of displacements and widths at once. Cells are not fitted: up to 0.3 % off,
the true set still has the lowest R of all sets of its size on the measured mixtures (docs/science-xrd.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_tasks.xrd.phases import Phase
from reflux_tasks.xrd.profile import Profile, pseudo_voigt_sum, snip_background, strained_lines
from reflux_tasks.xrd.structure_files import Structure
from reflux_tasks.xrd.surrogate import peak_f1

DISPLACEMENTS_DEGREES = np.arange(-0.12, 0.30, 0.03)
"""Shift at angle 0; a sample off the axis by s shifts lines by -2 s / R cos(theta)."""
WIDTHS_DEGREES = (0.11, 0.17, 0.25)
ETA = 0.6
MAX_POINTS = 2100
"""Profiles with more points are rebinned: the surrogate needs no more."""
_BACKGROUND_TERMS = 3
_WEAKEST_LINE = 2e-4
_RIDGE = 1e-9
_PEAK_DEVIATIONS = 6.0


@dataclass(frozen=True)
class SurrogateScore:
    """How well simulated patterns of a set explain a profile; the lower `profile_r`, the better."""

    profile_r: float
    peak_f1: float
    displacement_degrees: float
    width_degrees: float


class ProfileSurrogate:
    """Scores any set of the candidates against one profile."""

    def __init__(self, profile: Profile, candidates: Mapping[str, Structure]) -> None:
        self.phases: dict[str, Phase] = {name: structure.phase for name, structure in candidates.items()}
        background = snip_background(profile)
        root = 1 / np.sqrt(np.maximum(profile.counts, 1))
        signal = (profile.counts - background) * root
        self._total = float(signal @ signal)
        self._columns: dict[str, list[int]] = {}
        self._grid = [(shift, width) for shift in DISPLACEMENTS_DEGREES for width in WIDTHS_DEGREES]
        matrix = self._patterns(profile.two_theta, candidates) * root
        matrix /= np.maximum(np.linalg.norm(matrix, axis=2, keepdims=True), 1e-300)
        self._gram = matrix @ matrix.transpose(0, 2, 1)
        self._overlap = matrix @ signal
        self._peaks = observed_peaks(profile, background)

    def _patterns(self, two_theta: np.ndarray, candidates: Mapping[str, Structure]) -> np.ndarray:
        """[grid, columns, points]: each candidate's patterns (two where it has a texture axis), then the background."""
        columns: list[np.ndarray] = []
        for name, structure in candidates.items():
            self._columns[name] = []
            for lines in _line_groups(structure):
                self._columns[name].append(len(columns))
                columns.append(np.array([_simulated(two_theta, *lines, *node) for node in self._grid]))
        x = (two_theta - two_theta.mean()) / 50
        columns += [np.broadcast_to(x**power, (len(self._grid), len(x))) for power in range(_BACKGROUND_TERMS)]
        return np.stack(columns, axis=1)

    def score(self, names: Sequence[str]) -> SurrogateScore:
        """Profile R and peak F1 of the set; raises KeyError for a name that is no candidate."""
        pattern_columns = [column for name in names for column in self._columns[name]]
        count = self._gram.shape[1]
        chosen = np.array([*pattern_columns, *range(count - _BACKGROUND_TERMS, count)])
        gram = self._gram[:, chosen[:, None], chosen[None]]
        overlap = self._overlap[:, chosen]
        coefficients = _non_negative(gram, overlap, len(pattern_columns))
        explained = 2 * (coefficients * overlap).sum(axis=1)
        explained -= np.einsum("gi,gij,gj->g", coefficients, gram, coefficients)
        best = int(np.argmax(explained))
        shift, width = self._grid[best]
        profile_r = float(np.sqrt(max(self._total - explained[best], 0.0) / max(self._total, 1e-300)))
        angles, heights = self._peaks
        moved = angles - shift * np.cos(np.radians(angles / 2))
        f1 = peak_f1([self.phases[name] for name in names], [0.0] * len(names), (moved, heights))
        return SurrogateScore(profile_r, f1, float(shift), float(width))


def _line_groups(structure: Structure) -> list[tuple[np.ndarray, np.ndarray]]:
    """1/(2d) and intensities: all lines; with a texture axis once more those along it, which plates make stronger."""
    phase, axis = structure.phase, structure.candidate.march
    inverse_2d, intensity = strained_lines(phase, np.ones(3))
    strong = intensity > _WEAKEST_LINE
    groups = [(inverse_2d[strong], intensity[strong])]
    if axis is not None:
        reached = phase.hkl[: len(inverse_2d)]  # lines rise with the angle: what is out of reach is at the end
        along = strong & (np.abs(np.cross(reached, axis)).sum(axis=1) < 1e-9)
        if along.any():
            groups.append((inverse_2d[along], intensity[along]))
    return groups


def _simulated(
    two_theta: np.ndarray, inverse_2d: np.ndarray, intensity: np.ndarray, displacement: float, width: float
) -> np.ndarray:
    cosine = np.sqrt(np.maximum(1 - (inverse_2d * 1.5406) ** 2, 0.0))
    widths = np.full(len(inverse_2d), width)
    return pseudo_voigt_sum(two_theta, inverse_2d, intensity, widths=widths, eta=ETA, zero_shift=displacement * cosine)


def _non_negative(gram: np.ndarray, overlap: np.ndarray, constrained: int) -> np.ndarray:
    """Least-squares coefficients [grid, columns] whose first `constrained` columns are not negative.

    An active set per grid node: columns that come out negative are switched off until none is. It is not the exact
    minimum when a column should come back, which a handful of patterns does not need.
    """
    nodes, columns = overlap.shape
    active = np.ones((nodes, columns), bool)
    identity = np.eye(columns)
    for _ in range(constrained + 1):
        both = active[:, :, None] & active[:, None, :]
        system = np.where(both, gram, 0.0) + identity * np.where(active, _RIDGE, 1.0)[:, None, :]
        solved = np.linalg.solve(system, np.where(active, overlap, 0.0)[:, :, None])[:, :, 0]
        negative = solved[:, :constrained] < 0
        if not negative.any():
            break
        active[:, :constrained] &= ~negative
    return np.where(active, solved, 0.0)


def observed_peaks(profile: Profile, background: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Angles and heights of peaks that stand out of the counting noise, at least 1 % of the highest."""
    from scipy.signal import find_peaks

    signal = np.convolve(profile.counts - background, np.ones(3) / 3, "same")
    noise = float(np.median(np.sqrt(np.maximum(profile.counts, 1)))) / np.sqrt(3)
    found, _ = find_peaks(signal, prominence=_PEAK_DEVIATIONS * noise, distance=4)
    found = found[signal[found] > 0.01 * signal.max()]
    return profile.two_theta[found], np.maximum(signal[found], 0.0)
