"""Keys of crystal structures, over random changes of the way a structure is written down."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymatgen.core import Lattice, Structure

from reflux_tasks.canonical_structure import structure_from_key, structure_key

PEROVSKITE = Structure(
    Lattice.cubic(4.0), ["Ba", "Ti", "O", "O", "O"], [[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
)
RUTILE = [[0, 0, 0], [0.3053, 0.3053, 0]]
QUARTZ = [[0.47, 0, 1 / 3], [0.413, 0.267, 0.214]]
TRICLINIC = [[0.1, 0.2, 0.3], [0.61, 0.17, 0.4], [0.32, 0.71, 0.83]]
STRUCTURES = (
    PEROVSKITE,
    Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3]),
    Structure.from_spacegroup("P6_3/mmc", Lattice.hexagonal(3.2, 5.2), ["Mg"], [[1 / 3, 2 / 3, 0.25]]),
    Structure.from_spacegroup("P4_2/mnm", Lattice.tetragonal(4.594, 2.959), ["Ti", "O"], RUTILE),
    Structure.from_spacegroup("P3_121", Lattice.hexagonal(4.913, 5.405), ["Si", "O"], QUARTZ),
    Structure(Lattice.from_parameters(4.1, 5.2, 6.3, 81, 77, 68), ["Cu", "S", "S"], TRICLINIC),
)
changes = st.tuples(
    st.sampled_from(range(len(STRUCTURES))),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1)]),
)


def rewritten(structure, seed, multiples):
    """The same crystal in another basis, supercell, place, orientation and order of atoms."""
    rng = np.random.default_rng(seed)
    shear = np.eye(3, dtype=int)
    i, j = rng.choice(3, 2, replace=False)
    shear[i, j] = rng.integers(-1, 2)
    made = structure.copy()
    made.make_supercell(shear @ np.diag(multiples))
    order = rng.permutation(len(made))
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    rotation *= np.sign(np.linalg.det(rotation))
    coords = made.frac_coords[order] + rng.random(3) + rng.integers(-2, 3, (len(made), 3))
    return Structure(made.lattice.matrix @ rotation, [made.species[k] for k in order], coords)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(changes)
def test_a_crystal_has_one_key_however_it_is_written(change):
    number, seed, multiples = change
    assert structure_key(rewritten(STRUCTURES[number], seed, multiples)) == structure_key(STRUCTURES[number])


@settings(max_examples=15, derandomize=True, deadline=None)
@given(st.sampled_from(range(len(STRUCTURES))), st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.1, 0.5]))
def test_a_moved_atom_or_a_strained_cell_is_another_crystal(number, seed, angstrom):
    rng = np.random.default_rng(seed)
    structure = STRUCTURES[number]
    direction = rng.normal(size=3)
    moved = structure.copy()
    moved.make_supercell([2, 1, 1])
    moved.translate_sites(
        [int(rng.integers(len(moved)))], angstrom * direction / np.linalg.norm(direction), frac_coords=False
    )
    strained = structure.copy()
    strained.apply_strain(0.002 + 0.01 * rng.random(3))
    assert len({structure_key(each) for each in (structure, moved, strained)}) == 3


@pytest.mark.slow
def test_every_prototype_keeps_its_key_and_no_two_share_one():
    found = importlib.util.find_spec("pymatgen.analysis.prototypes")
    packed = Path(found.origin).with_name("aflow_prototypes.json.gz").read_bytes()
    structures = [Structure.from_dict(entry["snl"]) for entry in json.loads(gzip.decompress(packed))]
    keys = [structure_key(structure) for structure in structures]
    assert len(set(keys)) == len(structures)
    for seed, (structure, key) in enumerate(zip(structures, keys, strict=True)):
        multiples = (1, 1, 2) if len(structure) < 50 else (1, 1, 1)
        assert structure_key(rewritten(structure, seed, multiples)) == key, structure.formula


def test_other_elements_and_mirror_images_have_other_keys():
    keys = {structure_key(structure) for structure in STRUCTURES}
    swapped = PEROVSKITE.copy()
    swapped.replace_species({"Ba": "Sr"})
    quartz = STRUCTURES[4]
    mirrored = Structure(quartz.lattice.matrix * [1, 1, -1], quartz.species, quartz.frac_coords)
    keys |= {structure_key(swapped), structure_key(mirrored)}
    assert len(keys) == len(STRUCTURES) + 2


def test_a_key_gives_back_the_structure_that_it_stands_for():
    for structure in STRUCTURES:
        back = structure_from_key(structure_key(structure))
        assert back.composition.reduced_formula == structure.composition.reduced_formula
        assert _distances(back) == pytest.approx(_distances(structure), abs=5e-3)
    for wrong in ("", "1,2,3", "a,b,c,d,e,f;H:0,0,0"):
        with pytest.raises(ValueError, match=r"key|invalid literal"):
            structure_from_key(wrong)


def _distances(structure):
    """The shortest distance of each pair of elements, by name."""
    names = sorted({str(species) for species in structure.species})
    found = {(first, second): 9.0 for first in names for second in names}
    for center, neighbors in zip(structure, structure.get_all_neighbors(7.0), strict=True):
        for neighbor in neighbors:
            pair = (center.specie.symbol, neighbor.specie.symbol)
            found[pair] = min(found[pair], neighbor.nn_distance)
    return [found[pair] for pair in sorted(found)]


def test_structures_without_a_reliable_key_are_refused():
    flat = Structure(Lattice([[4, 0, 0], [4, 1e-4, 0], [0, 0, 4]]), ["H"], [[0, 0, 0]])
    huge = Structure(Lattice.cubic(2e3), ["H"], [[0, 0, 0]])
    partial = Structure(Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    crowd = Structure(Lattice.cubic(40), ["H"] * 1601, np.random.default_rng(0).random((1601, 3)))
    broken = Structure(Lattice.cubic(4), ["H"], [[0, 0, float("nan")]])
    for structure in (flat, huge, partial, crowd, broken):
        with pytest.raises(ValueError, match=r"key|flat|finite"):
            structure_key(structure)
