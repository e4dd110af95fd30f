"""Runs a Rietveld refinement in a process of the system's Python, where Debian installs ObjCryst++."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reflux_tasks.verify import VerificationError, VerifierUnavailable
from reflux_tasks.xrd.profile import Profile, snip_background

MAX_CELL_VOLUME = 4000.0
"""Cubic angstrom; rietveld/crystals.py refuses more, and more independent reflections than a real phase has."""
SCRIPT = Path(__file__).with_name("rietveld")
MAX_PHASES = 5
WAY_OUT = "install the Debian package: apt-get install python3-pyobjcryst"
_PIPES = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "env": {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
}
BISO_SQUARE_ANGSTROM: dict[str, float] = {"default": 0.45, "O": 0.7, "C": 0.8, "Li": 1.2, "H": 2.0}
"""Usual isotropic displacement factors at room temperature; refining them makes mass fractions worse."""


class RefinementRefused(VerificationError):
    """The phase set breaks a cap on phases, volume, sites or reflections: it would cost far more than others."""


@dataclass(frozen=True)
class Candidate:
    """A crystal structure to refine: cell, Hall symbol and asymmetric unit."""

    name: str
    cell: tuple[float, float, float, float, float, float]
    """a, b, c in angstrom; alpha, beta, gamma in degrees."""
    hall: str
    sites: tuple[tuple[str, float, float, float, int], ...]
    """Element, fractional coordinates and multiplicity of each atom of the asymmetric unit."""
    march: tuple[int, int, int] | None = None
    """Axis of preferred orientation (March-Dollase), None for a random powder."""


@dataclass(frozen=True, kw_only=True)
class RefinementOptions:
    """How to refine; the defaults are for measured lab patterns."""

    wavelength: str | float = "Cu"
    """"Cu" is the K-alpha1, K-alpha2 doublet with ratio 0.5; a number is a single wavelength in angstrom."""
    shift: Literal["displacement", "zero"] = "displacement"
    """Which angle error is refined; both at once are correlated."""
    cell_limit: float = 0.012
    """Largest relative change of a cell length."""
    effort: Literal["full", "fast"] = "full"
    biso: Mapping[str, float] = field(default_factory=lambda: dict(BISO_SQUARE_ANGSTROM))
    cpu_seconds: int = 15
    """Hard limit of processor time; the process ends when it is spent."""


@dataclass(frozen=True)
class PhaseFit:
    """One phase after the refinement; the definitions are in rietveld/figures.py."""

    name: str
    scale: float
    need: float
    mass_fraction: float
    """May lie outside 0..1 when a scale is negative; never clipped."""
    cell: tuple[float, float, float]
    cell_shift: float
    """Largest relative change of a cell length."""


@dataclass(frozen=True)
class Fit:
    """Result of a refinement. R_wp = sqrt(sum w (yo - yc)^2 / sum w yo^2), w = 1 / max(yo, 1)."""

    r_wp: float
    r_wb: float
    """As R_wp with the background taken off the observed counts of the denominator."""
    r_exp: float
    goodness: float
    """R_wp / R_exp."""
    points: int
    parameters: int
    shift_degrees: float
    phases: tuple[PhaseFit, ...]
    notes: tuple[str, ...]
    cpu_seconds: float

    @property
    def r_model(self) -> float:
        """R_wb without the part that counting statistics explain: R_wb sqrt(1 - 1 / goodness^2)."""
        return self.r_wb * math.sqrt(max(1 - 1 / max(self.goodness, 1e-9) ** 2, 0.0))


Process = subprocess.Popen[str]


def _start(command: Sequence[str], **options: Any) -> Process:
    return subprocess.Popen(command, text=True, **options)


def refine(
    profile: Profile,
    candidates: Sequence[Candidate],
    options: RefinementOptions,
    python: Path | None = None,
    start: Callable[..., Process] = _start,
    ended: Callable[[Process], None] = lambda process: None,
) -> Fit:
    """Refines the phases against a profile in a fresh process of `python` (None: the system's).

    `start` takes what subprocess.Popen takes, and `ended` gets the process when it was waited for. Raises
    VerifierUnavailable without ObjCryst++, RefinementRefused, or VerificationError when the process fails or spends
    its limit.
    """
    request = {
        "two_theta_degrees": profile.two_theta.tolist(),
        "counts": profile.counts.tolist(),
        "background": snip_background(profile).tolist(),
        "phases": [asdict(candidate) for candidate in candidates],
        **asdict(options),
    }
    command = [str(python or system_python()), "-I", str(SCRIPT)]
    try:
        process = start(command, **_PIPES)
    except OSError as error:
        raise VerifierUnavailable(f"cannot start {command[0]}: {error.strerror}; {WAY_OUT}") from error
    try:
        answer = _ask(process, json.dumps(request), options.cpu_seconds)
    finally:
        ended(process)
    if "error" in answer:
        raise RefinementRefused(f"refinement refused: {answer['error']}")
    phases = tuple(PhaseFit(**{**phase, "cell": tuple(phase["cell"])}) for phase in answer["phases"])
    fit = Fit(**{**answer, "phases": phases, "notes": tuple(answer["notes"])})
    if not np.isfinite([fit.r_wp, fit.r_wb, *(phase.need for phase in phases)]).all():
        raise VerificationError("refinement diverged: a figure of merit is not finite")
    return fit


def _ask(process: Process, request: str, cpu_seconds: int) -> dict[str, Any]:
    # a busy machine stretches wall time; the limit of processor time is the one that counts
    wall_seconds = 20 * cpu_seconds
    with process:
        try:
            answer, errors = process.communicate(request, timeout=wall_seconds)
        except subprocess.TimeoutExpired as error:
            raise VerificationError(f"refinement took more than {wall_seconds} s") from error
        finally:
            process.kill()  # no effect on one that has ended
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise VerificationError(f"refinement spent its {cpu_seconds} s of processor time, or was killed")
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise VerificationError(f"refinement ended with status {process.returncode}: {last[:200]}")
    return json.loads(answer)


@functools.lru_cache(maxsize=1)
def system_python() -> Path:
    """The first python3 of the default path that has ObjCryst++; raises VerifierUnavailable with the way out."""
    found = shutil.which("python3", path=os.defpath)
    if found is None:
        raise VerifierUnavailable(f"no python3 in {os.defpath}; {WAY_OUT}")
    probe = subprocess.run(
        [found, "-I", "-c", "import numpy, pyobjcryst.powderpattern"], capture_output=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        raise VerifierUnavailable(f"{found} cannot import pyobjcryst; {WAY_OUT}")
    return Path(found)
