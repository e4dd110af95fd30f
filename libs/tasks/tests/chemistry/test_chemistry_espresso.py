"""Running pw.x: which files it gets, how it ends, and real energies where it is installed."""

import os
import select
from pathlib import Path
from typing import Any

import pytest
from pymatgen.core import Lattice, Structure

from reflux_tasks.chemistry import espresso
from reflux_tasks.verify import VerificationError, VerifierUnavailable

SILICON = Structure.from_spacegroup("Fd-3m", Lattice.cubic(5.431), ["Si"], [[0, 0, 0]]).get_primitive_structure()
RUTILE = Structure.from_spacegroup(
    "P4_2/mnm", Lattice.tetragonal(4.594, 2.959), ["Ti", "O"], [[0, 0, 0], [0.3053, 0.3053, 0]]
)


@pytest.fixture(scope="module")
def pw() -> str:
    try:
        return espresso.program()
    except VerifierUnavailable as error:
        pytest.skip(f"Quantum ESPRESSO: {error}")


def shell(script: str, where: Path, seconds: float = 60.0) -> str:
    return espresso._run(["/bin/sh", "-c", script], where, seconds)


def test_one_functional_is_chosen_where_the_files_allow_it() -> None:
    chosen = {
        elements: espresso.choose_pseudopotentials(elements.split())
        for elements in ("Si", "Ti O", "Fe N", "Li Co O", "Ti N", "Xe", "Ti Xe")
    }
    assert {key: value and (value.functional, value.mixed) for key, value in chosen.items()} == {
        "Si": ("pbe", False),
        "Ti O": ("pz", False),
        "Fe N": ("pbe", False),
        "Li Co O": ("pbesol", False),
        "Ti N": ("pbe", True),
        "Xe": None,
        "Ti Xe": None,
    }


def test_every_pseudopotential_of_the_table_is_in_the_package(pw: str) -> None:
    del pw
    files = {name for table in espresso.PSEUDOPOTENTIALS.values() for name in table.values()}
    assert sorted(name for name in files if not (espresso.PSEUDO_FOLDER / name).is_file()) == []


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    for limit in (0.5, 2.0, 8.0, 32.0):  # a busy machine may not have started the child when a short limit ends
        with pytest.raises(VerificationError, match="more than"):
            shell("sleep 600 & echo $! > child; mv child ready; wait", tmp_path, limit)
        if ready.exists():
            break
    try:
        child = os.pidfd_open(int(ready.read_text()))
    except ProcessLookupError:
        return  # it has ended and was reaped
    try:
        assert select.select([child], [], [], 60)[0], "what the program started outlived it"
    finally:
        os.close(child)


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo lost; exit 3", "status 3: lost"), ("kill -9 $$", "status -9"), ("exit 1", "no output")],
)
def test_a_program_that_fails_is_an_error_and_no_grade(tmp_path: Path, script: str, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        shell(script, tmp_path)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "did not converge"),
        ("convergence has been achieved", "no energy"),
        ("convergence has been achieved\n!    total energy = -1.0 Ry\nconvergence NOT achieved", "did not converge"),
        ("convergence has been achieved\n!    total energy = ******** Ry", "no energy"),
    ],
)
def test_output_without_an_energy_is_an_error(output: str, reason: str) -> None:
    with pytest.raises(VerificationError, match=reason):
        espresso._energy(output)


def test_the_lowest_energy_of_a_relaxation_counts() -> None:
    line = "!    total energy              =     {} Ry"
    steps = [line.format(value) for value in ("-15.69", "-15.72", "-15.71")]
    output = "\n".join(["convergence has been achieved in 7 iterations", *steps])
    assert espresso._energy(output) == pytest.approx(-15.72 * espresso.RYDBERG_EV)


def test_a_relaxation_that_is_not_converged_counts_and_a_crash_does_not(tmp_path: Path) -> None:
    for status in (3, 255):
        assert (
            espresso._run(["/bin/sh", "-c", f"echo reached; exit {status}"], tmp_path, 60, (0, 3, 255)) == "reached\n"
        )
    with pytest.raises(VerificationError, match="status 3"):
        shell("exit 3", tmp_path)


@pytest.mark.parametrize(("motion", "calculation"), [("none", "scf"), ("atoms", "relax"), ("cell", "vc-relax")])
def test_the_input_says_what_moves_and_for_how_long(motion: espresso.Motion, calculation: str) -> None:
    pytest.importorskip("ase")
    pseudos = espresso.choose_pseudopotentials(["Si"])
    assert pseudos is not None
    text = espresso.pw_input(SILICON, pseudos, motion, 100.0)
    assert f"'{calculation}'" in text
    assert "85.0" in text


def test_a_missing_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espresso.shutil, "which", lambda *_args, **_more: None)
    with pytest.raises(VerifierUnavailable, match="apt-get install"):
        espresso.program()


def test_magnetic_elements_start_with_a_spin() -> None:
    pytest.importorskip("ase")
    iron = Structure(Lattice.cubic(2.87), ["Fe", "Fe"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    pseudos = espresso.choose_pseudopotentials(["Fe"])
    assert pseudos is not None
    assert "nspin" in espresso.pw_input(iron, pseudos, "none", 60.0)
    pseudos = espresso.choose_pseudopotentials(["Si"])
    assert pseudos is not None
    assert "nspin" not in espresso.pw_input(SILICON, pseudos, "none", 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "stretched_gain"), [(SILICON, 0.02), (RUTILE, 0.02)], ids=["silicon", "rutile"])
def test_real_crystals_are_more_stable_than_stretched_ones(pw: str, structure: Any, stretched_gain: float) -> None:
    del pw
    pseudos = espresso.choose_pseudopotentials(structure.symbol_set)
    assert pseudos is not None
    stretched = structure.copy()
    stretched.apply_strain(0.06)
    energies = [espresso.total_energy(each, pseudos) for each in (structure, stretched)]
    assert energies[1] - energies[0] > stretched_gain


@pytest.mark.slow
def test_a_real_relaxation_ends_below_where_it_starts(pw: str) -> None:
    del pw
    pseudos = espresso.choose_pseudopotentials(["Si"])
    assert pseudos is not None
    stretched = SILICON.copy()
    stretched.apply_strain(0.03)
    stretched.translate_sites([0], [0.01, 0.02, 0.0])
    still, atoms, cell = (espresso.total_energy(stretched, pseudos, motion) for motion in ("none", "atoms", "cell"))
    assert cell < atoms - 0.002 < still - 0.004
