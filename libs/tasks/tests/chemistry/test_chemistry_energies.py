"""Competing phases, charges and the bounds of the potential."""

import json
from pathlib import Path

import pytest
from pymatgen.core import Lattice, Structure

from reflux_tasks.chemistry import mlip
from reflux_tasks.chemistry.charges import charge_balanced
from reflux_tasks.chemistry.energies import PhaseEnergy, competing_energy, read_table, write_table
from reflux_tasks.csp import references
from reflux_tasks.synthesis import phases
from reflux_tasks.verify import VerifierUnavailable


def phase(name: str, energy: float, **amounts: float) -> PhaseEnergy:
    return PhaseEnergy(name, amounts, energy, energy, True)


PHASES = [phase("A", -1.0, A=1), phase("B", -2.0, B=1), phase("AB", -3.0, A=1, B=1), phase("C", -9.0, C=1)]


def test_the_competing_energy_is_the_hull_at_one_composition() -> None:
    assert competing_energy({"A": 1, "B": 1}, PHASES) == pytest.approx(-3.0)
    assert competing_energy({"A": 3, "B": 1}, PHASES) == pytest.approx(-2.0)
    assert competing_energy({"A": 1, "B": 3}, PHASES) == pytest.approx(-2.5)
    assert competing_energy({"A": 2, "B": 2}, PHASES[:2]) == pytest.approx(-1.5)


def test_without_phases_of_the_elements_there_is_no_competition() -> None:
    assert competing_energy({"D": 1}, PHASES) is None
    assert competing_energy({"A": 1, "D": 1}, PHASES) is None


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "energies.json"
    path.write_text('{"model": "other", "phases": []}')
    with pytest.raises(ValueError, match="make it again"):
        read_table(path)


def test_charges_balance_or_not() -> None:
    pytest.importorskip("smact")
    assert charge_balanced("BaTiO3")
    assert not charge_balanced("NaCl2")
    assert charge_balanced("Ti2O4") == charge_balanced("TiO2")
    assert not charge_balanced("Fe9999O10001"), "amounts beyond the cap"
    assert not charge_balanced("ScTiVCrMnFeCoNiCuZnMoRuRhPdAg"), "more combinations than can be tried"


def test_structures_beyond_the_potential_have_no_energy() -> None:
    try:
        mlip.load_model()
    except VerifierUnavailable as error:
        pytest.skip(str(error))
    lonely = Structure(Lattice.cubic(500), ["Ti", "O"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    heavy = Structure(Lattice.cubic(3.5), ["Cf"], [[0, 0, 0]])
    dense = Structure(Lattice.cubic(1.3), ["H", "He"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    dense.make_supercell([3, 2, 2])
    many = Structure(Lattice.cubic(3.2), ["Ti"], [[0, 0, 0]])
    many.make_supercell([5, 4, 4])
    for structure in (lonely, heavy, dense, many):
        with pytest.raises(mlip.EnergyUnknown):
            mlip.energy_per_atom(structure)
        with pytest.raises(mlip.EnergyUnknown):
            mlip.relax(structure, 3)


def test_the_potential_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        mlip.load_model()
    except VerifierUnavailable as error:
        pytest.skip(str(error))
    capfd.readouterr()
    salt = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    mlip.relax(salt.get_primitive_structure(), 2)
    assert capfd.readouterr() == ("", "")


def test_a_table_names_its_sources_and_leaves_out_what_has_no_energy(tmp_path: Path) -> None:
    pytest.importorskip("chgnet")
    salt = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    lonely = Structure(Lattice.cubic(500), ["Ti", "O"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    write_table(tmp_path / "t.json", "a book", [("salt", salt.get_primitive_structure()), ("lonely", lonely)])
    table = read_table(tmp_path / "t.json")
    assert list(table) == ["salt"]
    assert table["salt"].amounts == {"Na": 1.0, "Cl": 1.0}
    for path in (tmp_path / "t.json", references.TABLE, phases.TABLE):
        source = json.loads(path.read_text())["source"]
        assert source.endswith(f"; energies: {mlip.MODEL_SOURCE}"), path
        assert source.startswith("a book") or references.SOURCE in source
