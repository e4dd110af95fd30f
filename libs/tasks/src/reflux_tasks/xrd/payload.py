"""Parses the payload that `XrdTask.truth` makes, for the verifiers that need more of it than the labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TruePhase:
    """One phase of the sample."""

    label: str
    share: float
    """Its strongest line over that of the first phase."""
    cell_scale: tuple[float, float, float]
    """Lengths of the strained lattice vectors over the database's."""


@dataclass(frozen=True)
class Truth:
    """The sample and the peaks that the prompt shows."""

    phases: tuple[TruePhase, ...]
    elements: frozenset[str]
    """Elements that the prompt lists."""
    two_theta: np.ndarray
    """Degrees [peaks]."""
    intensity: np.ndarray
    """[peaks]."""
    zero_shift_degrees: float
    noise_seed: int


def parse_truth(payload: Mapping[str, Any]) -> Truth:
    """Raises ValueError for anything that is not a payload of this task."""
    try:
        phases = tuple(_true_phase(phase) for phase in payload["phases"])
        truth = Truth(
            phases=phases,
            elements=frozenset(payload["elements"]),
            two_theta=np.array(payload["two_theta_degrees"], float),
            intensity=np.array(payload["intensity"], float),
            zero_shift_degrees=float(payload["zero_shift_degrees"]),
            noise_seed=int(payload["noise_seed"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a payload of this task: {error!r}") from error
    if not phases or truth.noise_seed < 0 or truth.two_theta.shape != truth.intensity.shape:
        raise ValueError("not a payload of this task: no phases, a negative seed, or angles without intensities")
    return truth


def _true_phase(phase: Mapping[str, Any]) -> TruePhase:
    a, b, c = (float(factor) for factor in phase["cell_scale"])
    share = float(phase["share"])
    if not (0 < share <= 1 and all(0.9 < factor < 1.1 for factor in (a, b, c))):
        raise ValueError(f"share {share} or cell scale {(a, b, c)} out of range")
    return TruePhase(str(phase["label"]), share, (a, b, c))
