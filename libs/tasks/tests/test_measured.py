"""The verifier for measured patterns against answers that try to earn without knowing the phases."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflux_tasks.verify import Grade
from reflux_tasks.xrd import measured
from reflux_tasks.xrd.measured import MeasuredVerifier, clash, fraction_score
from reflux_tasks.xrd.measured_payload import measured_payload, named_payload
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.refinement import Candidate, Fit, RefinementRefused, refine
from reflux_tasks.xrd.structure_files import SHIPPED, read_text

pytestmark = pytest.mark.timeout(600)
MIXTURE = "TiO2_*-ZnO_*--2min.xrdml"
NAMES = ("TiO2", "ZnO", "TiO2-rutile", "NiO", "V2O5", "La(OH)3")


def cell_without_symmetry(seed: int = 3) -> str:
    """Sixty-four oxygen and zinc atoms in a cube of 12 A: small enough to look like a crystal, slow to refine."""
    rng = np.random.default_rng(seed)
    sites = [(np.array(site) + rng.uniform(-0.2, 0.2, 3)) / 4 for site in itertools.product(range(4), repeat=3)]
    atoms = [f"A{i} {'Zn' if i % 2 else 'O'} {x:.4f} {y:.4f} {z:.4f} 1" for i, (x, y, z) in enumerate(sites)]
    return cif("12", atoms)


def cif(length: str, atoms: list[str], c: str | None = None) -> str:
    cell = [*(f"_cell_length_{axis} {length}" for axis in "ab"), f"_cell_length_c {c or length}"]
    cell += [f"_cell_angle_{angle} 90" for angle in ("alpha", "beta", "gamma")]
    columns = [f"_atom_site_{tag}" for tag in ("label", "type_symbol", "fract_x", "fract_y", "fract_z", "occupancy")]
    group = ["_symmetry_space_group_name_H-M 'P 1'", "loop_", "_symmetry_equiv_pos_as_xyz", "'x, y, z'", "loop_"]
    return "\n".join(["data_x", *cell, *group, *columns, *atoms, ""])


def expanded(name: str, repeats: int = 1, moved: float = 0.0) -> str:
    """A shipped tetragonal candidate without symmetry, `repeats` cells along c, atoms moved at random (angstrom)."""
    structure = read_text(name, (SHIPPED / f"{name}.cif").read_text()).primitive.to_conventional()
    structure.make_supercell([1, 1, repeats])
    if moved:
        structure.perturb(moved)
    atoms = [f"{site.specie}{i} {site.specie} " + " ".join(f"{x:.6f}" for x in site.frac_coords) + " 1"
             for i, site in enumerate(structure)]  # fmt: skip
    a, _, c = structure.lattice.abc
    return cif(f"{a:.6f}", atoms, f"{c:.6f}")


@pytest.fixture(scope="module", autouse=True)
def each_set_is_refined_once() -> Iterator[None]:
    """Equal refinements give equal figures (test_full.py), so that the tests of this file share theirs."""
    known: dict[tuple[Any, ...], Fit] = {}

    def once(profile: Profile, candidates: Sequence[Candidate], *more: Any) -> Fit:
        key = (profile.counts.round().tobytes(), *((each.name, each.sites) for each in candidates))
        if key not in known:
            known[key] = refine(profile, candidates, *more)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "refine", once)
        yield


@pytest.fixture(scope="module")
def payload(xrd_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The 2-minute scan of 40 % anatase and 60 % zincite, with six candidates and two that a laboratory got wrong."""
    folder = tmp_path_factory.mktemp("candidates")
    for name in NAMES:
        (folder / f"{name}.cif").write_text((SHIPPED / f"{name}.cif").read_text())
    (folder / "anatase.cif").write_text((SHIPPED / "TiO2.cif").read_text().replace("9.5143", "9.5300"))
    (folder / "large.cif").write_text(cell_without_symmetry())
    [pattern] = (xrd_data / "measured").glob(MIXTURE)
    return measured_payload(pattern, folder)


@pytest.fixture(scope="module")
def verifier(objcryst: Path) -> MeasuredVerifier:
    return MeasuredVerifier(objcryst)


@pytest.fixture(scope="module")
def honest(verifier: MeasuredVerifier, payload: dict[str, Any]) -> Grade:
    [grade] = verifier.grade(payload, ["TiO2 <sep> ZnO <eos>"])
    return grade


def test_the_right_set_is_accepted_and_a_wrong_one_is_not(
    honest: Grade, verifier: MeasuredVerifier, payload: dict[str, Any]
) -> None:
    assert honest.detail["score"] > 0.85
    assert honest.reward == pytest.approx(0.7 * honest.detail["score"], abs=1e-4), "no claim, no pay for fractions"
    assert honest.detail["accepted"]
    assert honest.detail["r_wb"] < 0.20
    assert honest.detail["phases"]["TiO2"]["mass_fraction"] == pytest.approx(0.4, abs=0.15)
    swapped, replaced = verifier.grade(payload, ["ZnO <sep> TiO2 <eos> <pad>", "TiO2-rutile <sep> ZnO <eos>"])
    assert swapped.reward == honest.reward
    assert (replaced.reward, replaced.detail["accepted"]) == (0.0, False)


# What the reward of each cheat is written for people in docs/science-xrd.md.
CHEATS = {
    "empty set": ("<eos>", "invalid", "without a name"),
    "all phases": (" <sep> ".join(NAMES) + " <eos>", "scored", "more than 5"),
    "spurious phase, tiny fraction": ("TiO2 <sep> ZnO <sep> NiO <eos>", "scored", "NiO: not needed"),
    "spurious phase, negative fraction": ("TiO2 <sep> ZnO <sep> V2O5 <eos>", "scored", "V2O5: negative scale"),
    "isostructural phase on top": ("TiO2 <sep> ZnO <sep> anatase <eos>", "scored", "a phase twice"),
    "repeated phase": ("TiO2 <sep> TiO2 <sep> ZnO <eos>", "scored", "a phase twice"),
    "invented name": ("TiO2 <sep> ZnO2 <eos>", "scored", "no candidate"),
    "constant answer": ("V2O5 <sep> La(OH)3 <eos>", "scored", ": "),
    "NaN lattice": (cif("nan", ["Zn1 Zn 0 0 0 1"]), "invalid", "cannot be"),
    "large cell without symmetry": (cell_without_symmetry(4), "scored", "no candidate"),
    "large cell that is a candidate": ("large <sep> ZnO <eos>", "invalid", "independent reflections"),
    "copied prompt": (json.dumps(list(range(3000))), "invalid", "no <eos>"),
    "megabytes": ("TiO2 <sep> " * 10**5 + "<eos>", "invalid", "characters"),
    "hundreds of structures": (cell_without_symmetry(4) * 50, "invalid", "more than 5 structures"),
    "markup": ("data_\nloop_\n_cell_length_a\n" * 5, "invalid", "not all there"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_earns_nothing(verifier: MeasuredVerifier, payload: dict[str, Any], cheat: str) -> None:
    answer, outcome, reason = CHEATS[cheat]
    [grade] = verifier.grade(payload, [answer])
    assert (grade.outcome, grade.reward) == (outcome, 0.0)
    assert reason in grade.detail.get("gate", grade.detail.get("reason", ""))


def test_other_settings_of_a_phase_earn_what_the_phase_earns_but_not_twice(
    verifier: MeasuredVerifier, payload: dict[str, Any], honest: Grade
) -> None:
    zincite = (SHIPPED / "ZnO.cif").read_text()
    supercell, twice, moved = (
        expanded("TiO2", repeats=2) + zincite,
        expanded("TiO2", repeats=2) + expanded("TiO2") + zincite,
        expanded("TiO2", moved=0.6) + zincite,
    )
    grades = verifier.grade(payload, [supercell, twice, moved])
    assert grades[0].reward == honest.reward
    assert [grade.detail.get("gate") for grade in grades[1:]] == ["a phase twice", "a phase that is no candidate"]
    assert [grade.reward for grade in grades[1:]] == [0.0, 0.0]


def test_claimed_fractions_earn_their_part_by_how_far_the_worst_is_off(
    verifier: MeasuredVerifier, payload: dict[str, Any], honest: Grade
) -> None:
    score = honest.detail["score"]
    claims = ["TiO2 0.41 <sep> ZnO 0.59", "ZnO 0.7 <sep> TiO2 0.3", "TiO2 0.8 <sep> ZnO 0.2", "TiO2 0.4 <sep> ZnO"]
    weighed = {**payload, "weighed": {"TiO2": 0.4, "ZnO": 0.6}}
    right, off, wrong, partial = verifier.grade(weighed, [f"{claim} <eos>" for claim in claims])
    assert [right.reward, off.reward, wrong.reward] == pytest.approx([score, 0.85 * score, 0.7 * score], abs=1e-3)
    assert [grade.detail["exact"] for grade in (right, off, wrong)] == [1, 1, 1], "of phases, not of fractions"
    assert (partial.outcome, "all or none" in partial.detail["reason"]) == ("invalid", True)
    [of_refined] = verifier.grade(payload, ["TiO2 0.36 <sep> ZnO 0.64 <eos>"])
    assert of_refined.reward == pytest.approx(score, abs=1e-3), "without weighed fractions the refined ones count"


@pytest.mark.parametrize(
    ("claimed", "score"),
    [
        ({"A": 0.45, "B": 0.55}, 1.0),
        ({"A": 0.5, "B": 0.5}, 0.5),
        ({"A": 0.56, "B": 0.44}, 0.0),
        ({"A": 0.4, "C": 0.6}, 0.0),
    ],
)
def test_the_rule_of_fractions(claimed: dict[str, float], score: float) -> None:
    assert fraction_score(claimed, {"A": 0.4, "B": 0.6}) == pytest.approx(score, abs=1e-9)


def test_a_neighbour_in_the_periodic_table_earns_nothing_beside_the_phase_it_stands_for(
    verifier: MeasuredVerifier, payload: dict[str, Any], honest: Grade
) -> None:
    cobalt = (SHIPPED / "ZnO.cif").read_text().replace("Zn", "Co")
    both = {**payload, "candidates": {**payload["candidates"], "CoO": cobalt}}
    wrong, right = verifier.grade(both, ["TiO2 <sep> CoO <eos>", "TiO2 <sep> ZnO <eos>"])
    assert (wrong.reward, wrong.detail["gate"]) == (0.0, "CoO: ZnO of the same structure type fits better")
    assert right.reward == honest.reward


def test_a_neighbour_that_cannot_be_refined_is_no_better(
    verifier: MeasuredVerifier, payload: dict[str, Any], honest: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = measured.refine

    def refuse(profile: Profile, candidates: Sequence[Candidate], *more: Any) -> Fit:
        if any(each.name == "CdO" for each in candidates):
            raise RefinementRefused("too many reflections")
        return once(profile, candidates, *more)

    monkeypatch.setattr(measured, "refine", refuse)
    cadmium = (SHIPPED / "ZnO.cif").read_text().replace("Zn", "Cd")
    both = {**payload, "candidates": {**payload["candidates"], "CdO": cadmium}}
    assert verifier.grade(both, ["TiO2 <sep> ZnO <eos>"])[0].reward == honest.reward


def test_an_empty_folder_of_candidates_leaves_the_verifier_usable(objcryst: Path, tmp_path: Path) -> None:
    MeasuredVerifier(objcryst, warm=tmp_path).prepare()


def test_a_pattern_can_be_named_with_the_hash_of_its_bytes(
    objcryst: Path, tmp_path: Path, payload: dict[str, Any], honest: Grade, xrd_data: Path
) -> None:
    [pattern] = (xrd_data / "measured").glob(MIXTURE)
    (tmp_path / pattern.name).write_bytes(pattern.read_bytes())
    verifier = MeasuredVerifier(objcryst, patterns=tmp_path)
    named = {**named_payload(pattern), "candidates": {name: payload["candidates"][name] for name in ("TiO2", "ZnO")}}
    assert verifier.grade(named, ["TiO2 <sep> ZnO <eos>"])[0].reward == pytest.approx(honest.reward, abs=1e-6)
    outside = f"../{tmp_path.name}/{pattern.name}"  # the same file, by a way that leaves the folder
    for wrong in ({"sha256": "0" * 64}, {"pattern_file": outside}, {"pattern_file": "none.xy"}):
        with pytest.raises(ValueError, match=r"sha256 differs|no pattern"):
            verifier.grade({**named, **wrong}, ["TiO2 <eos>"])


def test_the_order_of_an_answer_means_nothing_and_its_claims_do() -> None:
    verifier = MeasuredVerifier()
    assert verifier.canonical({}, "ZnO 0.60 <sep>  TiO2 0.4 <eos> <pad>") == "TiO2 0.4 <sep> ZnO 0.6 <eos>"
    assert verifier.canonical({}, "ZnO <sep> ZnO <eos>") == "ZnO <sep> ZnO <eos>"
    assert verifier.canonical({}, "data_x") is None
    assert verifier.canonical({}, "ZnO 0.9 <sep> TiO2 0.4 <eos>") is None


def test_an_element_that_is_not_in_the_sample_earns_nothing(
    verifier: MeasuredVerifier, payload: dict[str, Any]
) -> None:
    [grade] = verifier.grade({**payload, "elements": ["Zn", "O"]}, ["TiO2 <sep> ZnO <eos>"])
    assert (grade.reward, grade.detail["gate"]) == (0.0, "an element that is not in the sample")


def test_phases_of_one_type_whose_cells_reach_each_other_cannot_be_told_apart() -> None:
    zincite = (SHIPPED / "ZnO.cif").read_text()
    zinc, cobalt = (
        read_text("zinc", zincite),
        read_text("cobalt", zincite.replace("Zn", "Co").replace("3.2498", "3.255")),
    )
    larger = read_text("larger", zincite.replace("Zn", "Cd").replace("3.2498", "3.40").replace("5.2066", "5.40"))
    assert "overlap" in clash(zinc, cobalt)
    assert clash(zinc, larger) == ""
    assert clash(zinc, read_text("again", zincite)) == "a phase twice"


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [1.0] * 50},
        {"counts": "x"},
        {"counts": [float("nan")] * 200, "two_theta_degrees": list(range(200))},
        {"candidates": {}},
        {"candidates": 3},
        {"candidates": {"x": "data_"}},
        {"elements": 3},
        {"elements": "ZnO"},
        {"weighed": {"ZnO": 0.4}},
        {"weighed": {"NiO": 1.0}},
        {"pattern_file": "a.xy"},
    ],
)
def test_a_foreign_payload_is_the_callers_error(change: dict[str, Any]) -> None:
    counts = list(range(200))
    good = {"two_theta_degrees": counts, "counts": counts, "candidates": {"ZnO": (SHIPPED / "ZnO.cif").read_text()}}
    with pytest.raises(ValueError, match=r"payload|data_|points|cell|counts"):
        MeasuredVerifier(Path("/nonexistent")).grade({**good, **change}, ["x <eos>"])


def test_what_is_refused_is_never_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("refined")

    monkeypatch.setattr(measured, "refine", refuse)
    counts = [*range(90), *range(90, 0, -1)]
    payload = {
        "two_theta_degrees": list(range(180)),
        "counts": counts,
        "candidates": {"ZnO": (SHIPPED / "ZnO.cif").read_text()},
    }
    grades = MeasuredVerifier(Path("/nonexistent")).grade(payload, ["ZnO <sep> ZnO <eos>", "NiO <eos>", "ZnO"])
    assert [grade.reward for grade in grades] == [0.0] * 3
