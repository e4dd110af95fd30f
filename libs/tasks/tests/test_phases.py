import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from reflux_tasks.xrd import phases as phases_module
from reflux_tasks.xrd.phases import Phase, cache_file, line_angles, load_phases


@pytest.fixture
def builds(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts builds; a build takes the phases from the cache of the session."""
    stored, calls = load_phases(cache_dir, None), []

    def build() -> Iterator[Phase]:
        calls.append(1)
        yield from stored

    monkeypatch.setattr(phases_module, "_build", build)
    return calls


def assert_equal(left: list[Phase], right: list[Phase]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for field in dataclasses.fields(Phase):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_the_cache_returns_what_was_built(builds: list[int], cache_dir: Path, tmp_path: Path) -> None:
    first, second = load_phases(tmp_path, None), load_phases(tmp_path, None)
    assert len(builds) == 1
    assert_equal(first, load_phases(cache_dir, None))
    assert_equal(first, second)
    assert len(first) == 255


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 torn", None])
def test_a_damaged_cache_is_built_again(builds: list[int], tmp_path: Path, damage: bytes | None) -> None:
    load_phases(tmp_path)
    path = cache_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-2000] if damage is None else damage)
    assert len(load_phases(tmp_path)) == 128
    assert len(builds) == 2


def test_concurrent_callers_build_once_and_leave_no_parts(builds: list[int], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: load_phases(tmp_path / "new" / "folder"), range(8)))
    assert len(builds) == 1
    assert all(len(result) == 128 for result in results)
    assert sorted(path.suffix for path in (tmp_path / "new" / "folder").iterdir()) == [".lock", ".npz"]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "_build", lambda: iter(()))
    with pytest.raises(ValueError, match="concatenate"):
        load_phases(tmp_path)
    assert not list(tmp_path.glob("*.npz")) + list(tmp_path.glob("*.part"))


def test_a_subset_out_of_range_is_refused(cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="2 to 255"):
        load_phases(cache_dir, 256)


@pytest.mark.parametrize("name", ["TiO2_136", "LiNbO3_167", "ZrO2_14", "FeS2_1"])
def test_angles_of_an_unstrained_cell_are_those_of_pymatgen(task, name: str) -> None:
    from pymatgen.analysis.diffraction.xrd import XRDCalculator
    from pymatgen.core import Lattice, Structure

    phase = next(phase for phase in task.phases if phase.name == name)
    atoms = [(element, coord) for element, coord in zip(phase.species, phase.coords, strict=True)]
    # one atom per orbit is enough: positions depend on the lattice alone
    structure = Structure(Lattice(phase.lattice), [atom[0] for atom in atoms], [atom[1] for atom in atoms])
    every = XRDCalculator(wavelength=phases_module.WAVELENGTH_ANGSTROM).get_pattern(structure, False, (8, 95)).x
    assert all(np.abs(every - angle).min() < 1e-6 for angle in line_angles(phase.lattice, phase.hkl))


def test_multiplicities_add_up_to_the_formula(task) -> None:
    from pymatgen.core import Composition

    for phase in task.phases:
        cell: dict[str, int] = {}
        for element, multiplicity in zip(phase.species, phase.multiplicities, strict=True):
            cell[element] = cell.get(element, 0) + multiplicity
        assert Composition(cell).reduced_formula == phase.formula
