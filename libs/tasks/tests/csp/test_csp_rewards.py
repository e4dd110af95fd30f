"""Rewards of right answers, of other ways to write them, and of cheats."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reflux_tasks.csp.answers import expand, parse_answer
from reflux_tasks.csp.full import RelaxedVerifier
from reflux_tasks.csp.metrics import csp_figures
from reflux_tasks.csp.payload import parse_truth
from reflux_tasks.csp.rule import RuleVerifier
from reflux_tasks.csp.surrogate import FLOOR, WORST, SurrogateVerifier, clip_energy, energy_score, match_score
from reflux_tasks.csp.task import CspProblem, CspTask
from reflux_tasks.verify import Grade

RUTILE = "Ti O n2 sg136 4.594 2.959 Ti 0 0 0 O 0.3053 0.3053 0 <eos>"
ANOTHER = "Na Cl sg225 5.64 Na 0 0 0 Cl 0.5 0.5 0.5 <eos>"
VERIFIERS = (RuleVerifier(), SurrogateVerifier())


def in_p1(answer: str, multiples: tuple[int, int, int] = (1, 1, 1), shift: float = 0.13) -> str:
    """The same crystal, written out atom by atom in a larger cell with another origin."""
    structure = expand(parse_answer(answer))
    structure.make_supercell(multiples)
    amounts = answer.split(" sg")[0]
    cell = " ".join(f"{value:.4f}" for value in structure.lattice.parameters)
    sites = " ".join(
        f"{site.specie.symbol} " + " ".join(f"{value:.6f}" for value in (site.frac_coords + shift) % 1.0)
        for site in structure
    )
    return f"{amounts} sg1 {cell} {sites} <eos>"


@pytest.mark.usefixtures("chgnet")
def test_every_known_structure_in_the_words_of_the_task_earns_most_of_the_reward(csp: CspTask) -> None:
    for index in range(6):
        problem = csp.problem("heldout", index)
        for verifier in VERIFIERS:
            (grade,) = verifier.grade(csp.truth(problem), [csp.answer_words(problem)])
            assert grade.reward > 0.65, (csp.references[problem.reference].name, verifier.name, grade)


@pytest.mark.usefixtures("chgnet")
@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_other_ways_to_write_a_crystal_earn_the_same(rutile: dict[str, Any], verifier: Any) -> None:
    same = [RUTILE, in_p1(RUTILE), in_p1(RUTILE, (2, 1, 1)), in_p1(RUTILE, (1, 1, 2), 0.4)]
    grades = verifier.grade(rutile, same)
    assert [grade.outcome for grade in grades] == ["scored"] * len(same)
    assert [grade.reward for grade in grades] == pytest.approx([grades[0].reward] * len(same), abs=1e-3)
    keys = {verifier.canonical(rutile, answer) for answer in same[:2]}
    assert len(keys) == 1
    assert None not in keys
    assert verifier.canonical(rutile, "no crystal") is None


@pytest.mark.usefixtures("chgnet")
@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_cheats_earn_nothing(rutile: dict[str, Any], verifier: Any) -> None:
    invalid = ["", "Ti O n2 sg136 nan 2.9 Ti 0 0 0 O 0.3 0.3 0 <eos>", "Ti O n2 sg1 1 1 1 90 90 90 Ti 0 0 0 <eos>"]
    easy = [ANOTHER, "Ti sg194 2.95 4.68 Ti 1/3 2/3 1/4 <eos>", "Ti O sg225 4.2 Ti 0 0 0 O 0.5 0.5 0.5 <eos>"]
    grades = verifier.grade(rutile, [*invalid, *easy])
    assert [grade.outcome for grade in grades] == ["invalid"] * 3 + ["scored"] * 3
    assert [grade.reward for grade in grades] == [0.0] * 6
    assert all(grade.detail["reason"] for grade in grades[:3])
    assert all(grade.detail["gate"] == "another composition" for grade in grades[3:])


@pytest.mark.usefixtures("chgnet")
def test_a_constant_answer_and_random_atoms_earn_nothing(csp: CspTask, rutile: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    numbers = rng.random((6, 6, 3))
    names = ["Ti", "Ti", "O", "O", "O", "O"]
    random = [
        "Ti O n2 sg1 4.6 4.6 3 90 90 90 "
        + " ".join(f"{name} {x:.4f} {y:.4f} {z:.4f}" for name, (x, y, z) in zip(names, each, strict=True))
        + " <eos>"
        for each in numbers
    ]
    for verifier in VERIFIERS:
        assert np.mean([grade.reward for grade in verifier.grade(rutile, random)]) < 0.03
        problems = [csp.problem("train", index) for index in range(20)]
        constant = [verifier.grade(csp.truth(problem), [RUTILE])[0].reward for problem in problems]
        assert np.mean(constant) < 0.1


@pytest.mark.usefixtures("chgnet")
def test_a_wrong_structure_of_the_right_composition_is_told_from_the_right_one(rutile: dict[str, Any]) -> None:
    stretched = "Ti O n2 sg136 5.4 2.4 Ti 0 0 0 O 0.3053 0.3053 0 <eos>"
    fluorite = "Ti O n2 sg225 4.8 Ti 0 0 0 O 0.25 0.25 0.25 <eos>"
    right, other, wrong = SurrogateVerifier().grade(rutile, [RUTILE, stretched, fluorite])
    assert right.reward > 0.95
    assert wrong.reward < 0.6 * right.reward
    assert other.reward < right.reward
    assert "r_rmse" not in wrong.detail, "rmse is averaged over matched answers only"


@pytest.mark.usefixtures("chgnet")
def test_a_relaxed_structure_is_compared_with_what_competes(
    csp: CspTask, problem_of: Callable[[str], CspProblem]
) -> None:
    problem = problem_of("NaCl_225")
    grades = RelaxedVerifier().grade(csp.truth(problem), [ANOTHER, "Na Cl sg221 3.4 Na 0 0 0 Cl 0.5 0.5 0.5 <eos>"])
    assert grades[0].reward > 0.97
    assert grades[0].detail["converged"] == 1
    assert grades[1].reward < grades[0].reward - 0.3


def test_a_loose_match_is_worth_little() -> None:
    assert [match_score(found) for found in (("x", 0.0), ("x", 0.4), ("x", 0.6), None)] == pytest.approx(
        [1.0, 0.04, 0.0, 0.0]
    )


def test_energies_out_of_range_are_clipped_flagged_and_worthless() -> None:
    assert clip_energy(float("nan")) == (WORST, False)
    assert clip_energy(float("inf")) == (WORST, False)
    assert clip_energy(-50.0) == (FLOOR, True)
    assert clip_energy(-0.05) == (-0.05, False)
    assert energy_score(FLOOR, True, 0.5) == 0.0
    assert energy_score(-0.05, False, 0.5) == 1.0
    assert energy_score(WORST, False, 0.5) == 0.0


def test_a_payload_of_another_task_is_an_error() -> None:
    for payload in ({}, {"amounts": {"Ti": 1}, "known": []}, {"amounts": 3, "known": [{}]}):
        with pytest.raises(ValueError, match="not a payload"):
            parse_truth(payload)


def test_figures_count_the_invalid_as_misses_and_average_rms_over_matches() -> None:
    hit, near = Grade("scored", 1.0, {"r_rmse": 0.1}), Grade("scored", 0.8, {"r_rmse": 0.3})
    miss, broken = Grade("scored", 0.2, {}), Grade("invalid", 0.0, {"reason": "x"})
    figures = csp_figures([[hit, miss], [miss, near], [broken, miss], [broken, broken]])
    assert figures.match_rate == 0.25
    assert figures.match_at_n == 0.5
    assert figures.rmse == pytest.approx(0.2)
    assert figures.valid == pytest.approx(5 / 8)
    assert csp_figures([[broken]]).rmse is None
    with pytest.raises(ValueError, match="at least one"):
        csp_figures([])


def test_grades_are_plain_json(rutile: dict[str, Any]) -> None:
    for grade in RuleVerifier().grade(rutile, [RUTILE, "", ANOTHER]):
        json.dumps(dict(grade.detail))
