"""A simulated diffractometer: counts of the strained true sample that a problem's payload describes."""

import numpy as np

from reflux_tasks.xrd.database import PhaseDatabase
from reflux_tasks.xrd.patterns import TWO_THETA_MAX_DEGREES, TWO_THETA_MIN_DEGREES
from reflux_tasks.xrd.payload import Truth
from reflux_tasks.xrd.profile import KALPHA_ANGSTROM, Profile, pseudo_voigt_sum, strained_lines

STEP_DEGREES = 0.03
PEAK_COUNTS = 8000.0
"""Expected counts above background at the highest point."""
ETA = 0.5
_WIDTH_DEGREES, _WIDTH_SLOPE = 0.10, 0.001
"""Full width = 0.10 degrees + 0.001 * two-theta."""


def simulate_measurement(truth: Truth, database: PhaseDatabase) -> Profile:
    """Counts from 10 to 90 degrees: pseudo-Voigt K-alpha doublets, smooth background, Poisson statistics.

    Intensities are those of pymatgen (no anomalous dispersion, no thermal motion), which differ from the refinement's
    model by a few per cent, for nickel compounds by more: a model error as real data have it. Peak losses and jitter of
    the prompt are not repeated: they belong to the peak list, not to the sample. Deterministic by `noise_seed`. Raises
    ValueError for a phase that the database lacks.
    """
    two_theta = np.arange(TWO_THETA_MIN_DEGREES, TWO_THETA_MAX_DEGREES, STEP_DEGREES)
    signal = np.zeros_like(two_theta)
    for true_phase in truth.phases:
        if (phase := database.phases.get(true_phase.label)) is None:
            raise ValueError(f"not a payload of this task: no phase {true_phase.label!r} in the database")
        inverse_2d, intensity = strained_lines(phase, true_phase.cell_scale)
        widths = _WIDTH_DEGREES + _WIDTH_SLOPE * 2 * np.degrees(np.arcsin(inverse_2d * KALPHA_ANGSTROM[0]))
        areas = intensity / intensity.max() * true_phase.share
        signal += pseudo_voigt_sum(
            two_theta, inverse_2d, areas, widths=widths, eta=ETA, zero_shift=truth.zero_shift_degrees
        )
    background = 200 * np.exp(-two_theta / 60) + 50
    expected = signal * (PEAK_COUNTS / signal.max()) + background
    return Profile(two_theta, np.random.default_rng(truth.noise_seed).poisson(expected).astype(float))
