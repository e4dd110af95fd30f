"""Energies and short relaxations by Quantum ESPRESSO: `pw.x` in a folder and process group of its own, in limited time.

P. Giannozzi et al., J. Phys.: Condens. Matter 21, 395502 (2009) and 29, 465901 (2017). Program and pseudopotentials are
Debian's packages quantum-espresso and quantum-espresso-data. Input is written by ASE.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reflux_tasks.verify import VerificationError, VerifierUnavailable

PSEUDO_FOLDER = Path("/usr/share/espresso/pseudo")
WAY_OUT = "install the Debian packages: apt-get install quantum-espresso quantum-espresso-data"
MAX_ATOMS = 12
TIME_LIMIT_SECONDS = 240.0
CUTOFF_RYDBERG, DENSITY_CUTOFF_RYDBERG = 30.0, 240.0
"""Wave functions and density; differences between structures of one composition converge faster than energies."""
KPOINT_LENGTH_ANGSTROM = 10.0
"""k-points per axis times its length."""
MAGNETIC = frozenset({"Cr", "Co", "Fe", "Ni"})
"""Elements that start with a spin polarisation."""

RELAX_STEPS = 6
"""Steps of BFGS: a relaxation starts at CHGNet's geometry, a few meV per atom above its end."""
RYDBERG_EV = 13.605693123
_TOTAL_ENERGY = re.compile(r"^!\s+total energy\s+=\s+(-?[0-9.]+) Ry", re.MULTILINE)
_OUT_OF_STEPS, _OUT_OF_TIME = 3, 255
"""Statuses with which pw.x ends a relaxation that has energies but is not converged."""

Motion = Literal["none", "atoms", "cell"]
"""What pw.x moves: nothing, the atoms in a fixed cell, or atoms and cell."""
_CALCULATIONS: Mapping[Motion, str] = {"none": "scf", "atoms": "relax", "cell": "vc-relax"}
Functional = Literal["pbe", "pbesol", "pz"]
PSEUDOPOTENTIALS: Mapping[Functional, Mapping[str, str]] = {
    "pbe": {
        "B": "B.pbe-n-rrkjus_psl.1.0.0.UPF",
        "C": "C.pbe-rrkjus.UPF",
        "Cr": "Cr.pbe-spn-kjpaw_psl.1.0.0.UPF",
        "Cu": "Cu.pbe-kjpaw.UPF",
        "Fe": "Fe.pbe-spn-rrkjus_psl.0.2.1.UPF",
        "Ge": "Ge.pbe-kjpaw.UPF",
        "H": "H.pbe-kjpaw.UPF",
        "I": "I.pbe-n-kjpaw_psl.1.0.0.UPF",
        "N": "N.pbe-n-rrkjus_psl.1.0.0.UPF",
        "Ni": "Ni.pbe-nd-rrkjus.UPF",
        "O": "O.pbe-rrkjus.UPF",
        "Pt": "Pt.rel-pbe-n-rrkjus.UPF",
        "Rh": "Rh.pbe-rrkjus_lb.UPF",
        "Si": "Si.pbe-rrkj.UPF",
    },
    "pbesol": {
        "Co": "Co.pbesol-spn-rrkjus_psl.0.3.1.UPF",
        "Fe": "Fe.pbesol-spn-kjpaw_psl.1.0.0.UPF",
        "Li": "Li.pbesol-s-rrkjus_psl.0.2.1.UPF",
        "Ni": "Ni.pbesol-n-rrkjus_psl.0.1.UPF",
        "O": "O.pbesol-n-rrkjus_psl.0.1.UPF",
    },
    "pz": {
        "Al": "Al.pz-vbc.UPF",
        "As": "As.pz-bhs.UPF",
        "Au": "Au.pz-rrkjus_aewfc.UPF",
        "B": "B.pz-vbc.UPF",
        "C": "C.pz-rrkjus.UPF",
        "Cu": "Cu.pz-d-rrkjus.UPF",
        "Fe": "Fe.pz-nd-rrkjus.UPF",
        "H": "H.pz-vbc.UPF",
        "Mg": "Mg.pz-n-vbc.UPF",
        "Ni": "Ni.pz-nd-rrkjus.UPF",
        "O": "O.pz-rrkjus.UPF",
        "Pb": "Pb.pz-d-van.UPF",
        "Pt": "Pt.rel-pz-n-rrkjus.UPF",
        "Si": "Si.pz-vbc.UPF",
        "Ti": "Ti.pz-sp-van_ak.UPF",
    },
}
"""By exchange-correlation functional; all files of one calculation share it, where the package has them."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_ess_singleton_isolated": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self",
    "OMPI_MCA_mtl": "^ofi,psm,psm2",
    "OMPI_MCA_osc": "^ucx",
    "UCX_LOG_LEVEL": "fatal",
}
"""Debian's pw.x is built on Open MPI. One process needs no network and no shared memory, which a sandbox refuses."""


@dataclass(frozen=True)
class PseudoSet:
    """One file per element. `mixed`: they were made with different functionals, and pw.x is told which one to use."""

    functional: Functional
    files: Mapping[str, str]
    mixed: bool


def choose_pseudopotentials(elements: Iterable[str]) -> PseudoSet | None:
    """PBE where it covers all elements, else PBEsol, else LDA, else a mix; None when an element has no file at all."""
    wanted = sorted(set(elements))
    for functional, files in PSEUDOPOTENTIALS.items():
        if all(element in files for element in wanted):
            return PseudoSet(functional, {element: files[element] for element in wanted}, mixed=False)
    mixed: dict[str, str] = {}
    for element in wanted:
        found = next((files[element] for files in PSEUDOPOTENTIALS.values() if element in files), None)
        if found is None:
            return None
        mixed[element] = found
    return PseudoSet("pbe", mixed, mixed=True)


def program() -> str:
    """Path of pw.x; raises VerifierUnavailable without it or without the pseudopotentials."""
    found = shutil.which("pw.x", path=os.defpath + os.pathsep + "/usr/local/bin")
    if found is None:
        raise VerifierUnavailable(f"pw.x is missing; {WAY_OUT}")
    if not PSEUDO_FOLDER.is_dir():
        raise VerifierUnavailable(f"no pseudopotentials in {PSEUDO_FOLDER}; {WAY_OUT}")
    try:
        import ase.io.espresso  # noqa: F401  what writes the input
    except ImportError as error:
        raise VerifierUnavailable(f"cannot import {error.name}; pip install 'reflux-tasks[chemistry]'") from error
    return found


def total_energy(
    structure: Any, pseudos: PseudoSet, motion: Motion = "none", time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> float:
    """Total energy of an ordered pymatgen Structure in eV per atom, the lowest of a relaxation that moves `motion`.

    A relaxation makes at most `RELAX_STEPS` steps, and stops by itself shortly before the time limit; what it reached
    until then counts. Raises VerifierUnavailable without the program, VerificationError when it fails, a
    self-consistent field does not converge, or it takes longer.
    """
    command = program()
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        where = Path(folder)
        (where / "pw.in").write_text(pw_input(structure, pseudos, motion, time_limit_seconds), encoding="ascii")
        accepted = (0,) if motion == "none" else (0, _OUT_OF_STEPS, _OUT_OF_TIME)
        output = _run([command, "-in", "pw.in"], where, time_limit_seconds, accepted)
        return _energy(output) / len(structure)


def pw_input(structure: Any, pseudos: PseudoSet, motion: Motion, time_limit_seconds: float) -> str:
    """Input of pw.x for one self-consistent calculation, or a relaxation that starts with it."""
    import io

    from ase.io.espresso import write_espresso_in
    from pymatgen.io.ase import AseAtomsAdaptor

    elements = sorted(pseudos.files)
    system: dict[str, Any] = {
        "ecutwfc": CUTOFF_RYDBERG,
        "ecutrho": DENSITY_CUTOFF_RYDBERG,
        "occupations": "smearing",
        "smearing": "mv",
        "degauss": 0.02,
    }
    if pseudos.mixed:
        system["input_dft"] = pseudos.functional
    if MAGNETIC & set(elements):
        system["nspin"] = 2
    atoms: Any = AseAtomsAdaptor.get_atoms(structure, msonable=False)
    if MAGNETIC & set(elements):
        atoms.set_initial_magnetic_moments([2.0 if symbol in MAGNETIC else 0.0 for symbol in atoms.symbols])
    data = {
        "control": {
            "calculation": _CALCULATIONS[motion],
            "disk_io": "none",
            "outdir": ".",
            "pseudo_dir": str(PSEUDO_FOLDER),
            "nstep": RELAX_STEPS,
            "max_seconds": 0.85 * time_limit_seconds,
        },
        "system": system,
        "electrons": {"conv_thr": 1e-6 * len(structure), "mixing_beta": 0.4, "electron_maxstep": 80},
    }
    grid = [max(1, math.ceil(KPOINT_LENGTH_ANGSTROM / length)) for length in structure.lattice.abc]
    text = io.StringIO()
    write_espresso_in(text, atoms, input_data=data, pseudopotentials=dict(pseudos.files), kpts=grid)
    return text.getvalue()


def _run(command: list[str], where: Path, seconds: float, accepted: tuple[int, ...] = (0,)) -> str:
    """Output of the program; its whole process group ends with it, whatever happens."""
    environment = {"PATH": os.defpath, "HOME": str(where), "TMPDIR": str(where), **_ENVIRONMENT}
    with subprocess.Popen(
        command,
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise VerificationError(f"pw.x took more than {seconds:.0f} s") from error
        finally:
            _end_group(process.pid)
    if process.returncode not in accepted:
        raise VerificationError(f"pw.x ended with status {process.returncode}: {_last_words(output)}")
    return output


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" %")]
    return " / ".join(lines[-3:])[:200] or "no output"


def _energy(output: str) -> float:
    """Lowest total energy in eV of the self-consistent fields that converged."""
    if "convergence has been achieved" not in output or "convergence NOT achieved" in output:
        raise VerificationError("the self-consistent field of pw.x did not converge")
    energies = [float(value) * RYDBERG_EV for value in _TOTAL_ENERGY.findall(output)]
    if not energies or not all(math.isfinite(energy) for energy in energies):
        raise VerificationError("the output of pw.x holds no energy")
    return min(energies)
