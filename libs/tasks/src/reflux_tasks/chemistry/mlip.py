"""Energies and relaxations by CHGNet, a universal interatomic potential; the only module here that imports torch.

B. Deng et al., CHGNet as a pretrained universal neural network potential for charge-informed atomistic modelling,
Nat. Mach. Intell. 5, 1031-1041 (2023). The weights (v0.3.0, 412,525 parameters) come inside the wheel `chgnet`; they
were fitted to the MPtrj set (GGA and GGA+U with the MP2020 corrections).
"""

import contextlib
import functools
import importlib.util
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reflux_tasks.verify import VerifierUnavailable

MODEL = "chgnet-0.3.0"
MODEL_SOURCE = "CHGNet (BSD-3-Clause), B. Deng et al., Nat. Mach. Intell. 5, 1031 (2023)"
WAY_OUT = "install the extra: pip install 'reflux-tasks[chemistry]'"
MAX_ENERGY_ATOMS = 32
"""Atoms of a cell whose energy is computed."""
MAX_TRIPLETS = 8_000
"""Pairs of bonds (3 A) at one atom, summed over atoms: what CHGNet's memory and time grow with (10^4 pairs take about
1 GB). Known structures have 3,300 at most; an answer far beyond them is dense nonsense."""
BOND_CUTOFF_ANGSTROM = 3.0
GRAPH_CUTOFF_ANGSTROM = 6.0
RELAXED_FORCE = 0.05
"""Largest force in eV/A at which a relaxation ends."""


class EnergyUnknown(ValueError):
    """The potential has no meaningful energy for this structure; the message says why."""


@dataclass(frozen=True)
class Relaxed:
    """The end of a relaxation of atoms and cell."""

    structure: Any
    """pymatgen Structure."""
    energy: float
    """eV per atom."""
    converged: bool
    """Whether the forces fell below `RELAXED_FORCE` within the steps."""
    steps: int


def require_model() -> None:
    """Raises VerifierUnavailable where the model is not installed; imports nothing."""
    if importlib.util.find_spec("chgnet") is None:
        raise VerifierUnavailable(f"chgnet is not installed; {WAY_OUT}")


@functools.lru_cache(maxsize=1)
def load_model() -> Any:
    """The model of this process, on one thread, so that a warm process can be forked. Raises VerifierUnavailable."""
    try:
        import torch

        torch.set_num_threads(1)
        with _silent():
            from chgnet.model.model import CHGNet

            return CHGNet.load(use_device="cpu", verbose=False)
    except ImportError as error:
        raise VerifierUnavailable(f"cannot import {error.name or error}; {WAY_OUT}") from error


def energy_per_atom(structure: Any) -> float:
    """Energy of an ordered pymatgen Structure in eV per atom; raises EnergyUnknown or VerifierUnavailable."""
    model = load_model()
    _check_size(structure)
    with _silent():
        try:
            energy = float(np.asarray(model.predict_structure(structure, task="e")["e"]))
        except (ValueError, RuntimeError, IndexError, KeyError) as error:  # what the graph of a strange cell ends in
            raise EnergyUnknown(f"CHGNet has no energy: {_short(error)}") from error
    if not math.isfinite(energy):
        raise EnergyUnknown("CHGNet's energy is not finite")
    return energy


def relax(structure: Any, steps: int) -> Relaxed:
    """Relaxes atoms and cell with FIRE, at most `steps` steps; raises EnergyUnknown or VerifierUnavailable."""
    model = load_model()
    _check_size(structure)
    with _silent():
        from chgnet.model.dynamics import StructOptimizer

        try:
            optimizer = StructOptimizer(model=model, use_device="cpu", optimizer_class="FIRE")
            end: dict[str, Any] = optimizer.relax(structure.copy(), fmax=RELAXED_FORCE, steps=steps, verbose=False)
        except (ValueError, RuntimeError, IndexError, KeyError, ArithmeticError) as error:
            raise EnergyUnknown(f"the relaxation broke off: {_short(error)}") from error
    trajectory, final = end["trajectory"], end["final_structure"]
    energy = float(trajectory.energies[-1]) / len(final)
    force = float(np.abs(np.linalg.norm(np.asarray(trajectory.forces[-1]), axis=1)).max())
    if not (math.isfinite(energy) and math.isfinite(force)):
        raise EnergyUnknown("the relaxation diverged: energy or forces are not finite")
    return Relaxed(final, energy, force <= RELAXED_FORCE, len(trajectory.energies) - 1)


def _check_size(structure: Any) -> None:
    """Bounds time and memory before the graph is built."""
    if len(structure) > MAX_ENERGY_ATOMS:
        raise EnergyUnknown(f"{len(structure)} atoms in the primitive cell, at most {MAX_ENERGY_ATOMS} are computed")
    if len(set(structure.get_neighbor_list(GRAPH_CUTOFF_ANGSTROM)[0].tolist())) < len(structure):
        raise EnergyUnknown(f"an atom without a neighbour within {GRAPH_CUTOFF_ANGSTROM:.0f} A")
    centres = structure.get_neighbor_list(BOND_CUTOFF_ANGSTROM)[0]
    triplets = int((np.bincount(centres, minlength=len(structure)) ** 2).sum())
    if triplets > MAX_TRIPLETS:
        raise EnergyUnknown(f"atoms too close together: {triplets} pairs of bonds, at most {MAX_TRIPLETS}")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """CHGNet prints what it does and torch warns about how; a verifier's output belongs to nobody."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"
