"""A simulated diffractometer: counts of the strained true sample that a problem's payload describes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.patterns import TWO_THETA_MAX_DEGREES, TWO_THETA_MIN_DEGREES
from reflux_tasks.xrd.profile import Profile, pseudo_voigt_sum, strained_lines

STEP_DEGREES = 0.03
PEAK_COUNTS = 8000.0
"""Expected counts above background at the highest point."""
ETA = 0.5
_WIDTH_DEGREES, _WIDTH_SLOPE = 0.10, 0.001
"""Full width = 0.10 degrees + 0.001 * two-theta."""


def simulate_measurement(payload: Mapping[str, Any], database: PhaseDatabase) -> Profile:
    """Counts from 10 to 90 degrees: pseudo-Voigt K-alpha doublets, smooth background, Poisson statistics.

    Intensities are those of pymatgen (no anomalous dispersion, no thermal motion), which differ from the refinement's
    model by a few per cent, for nickel compounds by more: a model error as real data have it. Peak losses and jitter of
    the prompt are not repeated: they belong to the peak list, not to the sample. Deterministic by the payload's
    `noise_seed`. Raises ValueError for a payload of another task.
    """
    two_theta = np.arange(TWO_THETA_MIN_DEGREES, TWO_THETA_MAX_DEGREES, STEP_DEGREES)
    signal = np.zeros_like(two_theta)
    try:
        for true_phase in payload["phases"]:
            phase = database.phases[true_phase["label"]]
            inverse_2d, intensity = strained_lines(phase, true_phase["cell_scale"])
            centres = 2 * np.degrees(np.arcsin(inverse_2d * 1.5418))
            areas = intensity / intensity.max() * true_phase["share"]
            widths = _WIDTH_DEGREES + _WIDTH_SLOPE * centres
            zero_shift = payload["zero_shift_degrees"]
            signal += pseudo_voigt_sum(two_theta, inverse_2d, areas, widths=widths, eta=ETA, zero_shift=zero_shift)
        seed = int(payload["noise_seed"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a payload of this task: {error!r}") from error
    background = 200 * np.exp(-two_theta / 60) + 50
    expected = signal * (PEAK_COUNTS / signal.max()) + background
    return Profile(two_theta, np.random.default_rng(seed).poisson(expected).astype(float))
