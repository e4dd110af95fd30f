from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.xrd.structure_files import SHIPPED, Structure, UnreadableStructure, read_file, read_folder, read_text

RUTILE = (SHIPPED / "TiO2-rutile.cif").read_text()
P1 = """data_x
_cell_length_a {a}
_cell_length_b {a}
_cell_length_c {a}
_cell_angle_alpha {angle}
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_symmetry_equiv_pos_as_xyz
'x, y, z'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
_atom_site_occupancy
{atoms}
"""


def p1(atoms: str, a: str = "4", angle: str = "90") -> str:
    return P1.format(atoms=atoms, a=a, angle=angle)


ROCK_SALT = p1(
    "\n".join(
        f"{element}{i} {element} {x} {y} {z} 1"
        for element, shift in (("Ni", 0.0), ("O", 0.5))
        for i, (x, y, z) in enumerate([(shift, 0, 0), (shift, 0.5, 0.5), (shift + 0.5, 0.5, 0), (shift + 0.5, 0, 0.5)])
    ),
    "4.1771",
)


def test_the_shipped_candidates_are_the_ten_precursors_and_two_polymorphs(shipped: dict[str, Structure]) -> None:
    found = shipped
    ten = {"ZnO", "NiO", "In2O3", "V2O5", "MnCO3", "TiO2", "ZrO2", "La(OH)3", "Li2CO3", "Bi2O3"}
    assert set(found) == ten | {"TiO2-rutile", "ZrO2-tetragonal"}
    assert found["MnCO3"].candidate.hall == '-R 3 2"c', "rhombohedral axes would lose c"
    assert found["V2O5"].candidate.march == (0, 0, 1)
    assert found["V2O5"].candidate.cell[2] == pytest.approx(4.368), "the plates lie along c"
    assert found["TiO2"].phase.space_group == 141
    for name, structure in found.items():
        assert structure.candidate.name == name
        assert all(multiplicity >= 1 for *_, multiplicity in structure.candidate.sites)
        assert (SHIPPED / f"{name}.cif").read_text().startswith("# ")


def test_a_cell_without_symmetry_and_a_poscar_give_the_same_phase(tmp_path: Path) -> None:
    cubic = read_text("NiO", ROCK_SALT)
    assert cubic.phase.space_group == 225
    poscar = "NiO\n4.1771\n1 0 0\n0 1 0\n0 0 1\nNi O\n4 4\nDirect\n" + "\n".join(
        line.split(maxsplit=2)[2] for line in ROCK_SALT.splitlines()[-8:]
    )
    (tmp_path / "NiO.vasp").write_text(poscar)
    other = read_file(tmp_path / "NiO.vasp")
    assert (other.name, other.phase.space_group) == ("NiO", 225)
    np.testing.assert_allclose(other.candidate.cell, cubic.candidate.cell)


def test_the_texture_axis_of_a_file_follows_its_cell_to_the_standard_setting() -> None:
    text = (SHIPPED / "V2O5.cif").read_text()
    for letter, value in zip("hkl", (1, 0, 0), strict=True):
        start = text.index(f"_pd_pref_orient_March_Dollase.index_{letter}")
        text = text[:start] + f"_pd_pref_orient_March_Dollase.index_{letter} {value}" + text[text.index("\n", start) :]
    assert read_text("V2O5", text).candidate.march == (1, 0, 0)
    unnamed = "\n".join(line for line in text.splitlines() if "March" not in line)
    assert read_text("V2O5", unnamed).candidate.march == (0, 0, 1)
    assert read_text("rutile", RUTILE).candidate.march is None


MANY = "\n".join(f"O{i} O {i % 12 / 12:.4f} {i // 12 % 12 / 12:.4f} {i // 144 / 12:.4f} 1" for i in range(1500))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.cif", "", r"a\.cif:1: the cell's lengths and angles are not all there"),
        ("a.cif", RUTILE[:200], "not all there"),
        ("a.cif", RUTILE[: RUTILE.index("_atom_site")], "not usable"),
        ("a.cif", p1("Ni Ni 0 0 0 1", angle="0"), r"a\.cif:5: cell angle alpha = 0 cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="nan"), r"a\.cif:2: cell length a = nan cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="inf"), r"a\.cif:2: cell length a = inf cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="-4"), r"a\.cif:2: cell length a = -4 cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="1e9"), r"a\.cif:2: cell length a = 1e9 cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 -1"), "not usable"),
        ("a.cif", p1("Ni Ni 0 0 0 0.5"), "occupancy"),
        ("a.cif", p1("Ni Ni nan 0 0 1\nO O 0.5 0 0 1"), "not usable"),
        ("a.cif", p1("Ni Ni 0 0 0 1\nO O 0.05 0 0 1"), "A apart"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="1.2"), "per atom cannot be"),
        ("a.cif", p1("Ni Ni 0 0 0 1", a="30"), "per atom cannot be"),
        ("a.cif", p1("Xx Xx 0 0 0 1"), "not usable"),
        ("a.cif", p1(MANY, a="40"), "atoms in the cell"),
        ("a.cif", p1("\n".join([MANY] * 3)), "more than 2000 lines"),
        ("a.cif", RUTILE + RUTILE.replace("data_", "data_2"), "2 structures"),
        ("a.vasp", "NiO\n", r"a\.vasp:2: needs 1 finite"),
        ("a.vasp", "NiO\n1\n1 0 0\n0 nan 0\n", r"a\.vasp:4: needs 3 finite"),
        ("a.vasp", "H\n1\n9 0 0\n0 9 0\n0 0 9\nH\n1000000\nDirect\n", r"a\.vasp:7: 1000000 atoms"),
        ("a.vasp", "H\n1\n9 0 0\n0 9 0\n0 0 9\nH\n2\nDirect\n0 0 0\n", "not usable"),
    ],
)
def test_structures_that_cannot_be_are_refused_with_line_and_reason(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnreadableStructure, match=message):
        read_file(tmp_path / name)


def test_a_formula_of_a_million_atoms_changes_nothing_and_bytes_are_capped(tmp_path: Path) -> None:
    text = RUTILE.replace("'Ti1 O2'", "'Ti1000000 O2000000'")
    assert read_text("a", text).phase.formula == "TiO2"
    (tmp_path / "a.cif").write_text(RUTILE + "#" * (3 * 2**20))
    with pytest.raises(UnreadableStructure, match="at most 2 MiB"):
        read_file(tmp_path / "a.cif")
    (tmp_path / "a.cif").write_bytes(RUTILE.encode("utf-16"))
    with pytest.raises(UnreadableStructure, match="UTF-8"):
        read_file(tmp_path / "a.cif")


@settings(max_examples=10, deadline=None)
@given(st.integers(0, len(RUTILE)), st.text("0123456789.-'_ \nxyz", max_size=12))
def test_damaged_cifs_are_refused_or_read_and_nothing_else_happens(place: int, damage: str) -> None:
    try:
        structure = read_text("a", RUTILE[:place] + damage + RUTILE[place + len(damage) :])
    except UnreadableStructure:
        return
    assert np.isfinite(structure.candidate.cell).all()


def test_an_empty_folder_is_an_error_and_a_bad_file_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no CIF"):
        read_folder(tmp_path)
    (tmp_path / "bad.cif").write_text("data_")
    (tmp_path / "rutile.cif").write_text(RUTILE)
    found, refused = read_folder(tmp_path)
    assert list(found) == ["rutile"]
    assert list(refused) == ["bad.cif"]
