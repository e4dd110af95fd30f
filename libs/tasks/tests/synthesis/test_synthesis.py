"""Recipes: grammar, gates, energies, competition, cheats and bad input."""

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.options import InvalidOption
from reflux_tasks.registry import create_task
from reflux_tasks.synthesis import thermo
from reflux_tasks.synthesis.answers import format_recipe, parse_answer
from reflux_tasks.synthesis.computed import computed_substance
from reflux_tasks.synthesis.metrics import synthesis_figures
from reflux_tasks.synthesis.payload import check_balance, parse_truth
from reflux_tasks.synthesis.phases import FORMULAS, TARGETS
from reflux_tasks.synthesis.shelf import PRECURSORS
from reflux_tasks.synthesis.task import SynthesisTask, usual_recipe
from reflux_tasks.synthesis.temperature import plausibility
from reflux_tasks.synthesis.units import atoms_of
from reflux_tasks.synthesis.verifiers import FullVerifier, RuleVerifier, SurrogateVerifier
from reflux_tasks.task import SPLITS
from reflux_tasks.verify import Grade

pytest.importorskip("smact")
TITANATE = {"target": "BaTiO3", "available": ["BaCO3", "BaO", "MgO", "TiO2"]}
RIGHT = "1 BaCO3 1 TiO2 to 1 and 1 CO2 at 1400 <eos>"
VERIFIERS = (RuleVerifier(), SurrogateVerifier(), FullVerifier())

INVALID = {
    "empty": ("", "no <eos>"),
    "undecodable bytes": (b"1 \xff\xfe to 1 at 900 <eos>".decode(errors="surrogateescape"), "no precursor"),
    "the target as a precursor": ("1 BaTiO3 to 1 at 1400 <eos>", "no precursor on the list"),
    "negative amount": ("-1 BaO 1 TiO2 to 1 at 1400 <eos>", "no amount"),
    "zero amount": ("0 BaO 1 TiO2 to 1 at 1400 <eos>", "no amount"),
    "amount of NaN": ("nan BaO 1 TiO2 to 1 at 1400 <eos>", "no amount"),
    "division by zero": ("1/0 BaO 1 TiO2 to 1 at 1400 <eos>", "no amount"),
    "huge amount": ("1000000 BaO 1 TiO2 to 1 at 1400 <eos>", "no amount"),
    "temperature of 10^9": ("1 BaO 1 TiO2 to 1 at 1000000000 <eos>", "no temperature"),
    "temperature of 5000": ("1 BaO 1 TiO2 to 1 at 5000 <eos>", "no temperature"),
    "no temperature": ("1 BaO 1 TiO2 to 1 <eos>", "'at' is needed"),
    "a precursor twice": ("1 BaO 1 BaO 1 TiO2 to 1 at 1400 <eos>", "twice"),
    "missing element": ("1 BaO to 1 at 1400 <eos>", "no precursor brings Ti"),
    "inert padding": ("1 BaO 1 TiO2 1 MgO to 1 at 1400 <eos>", "Mg has no place"),
    "unknown gas": ("1 BaO 1 TiO2 to 1 and 1 N2 at 1400 <eos>", "no gas"),
}
UNBALANCED = {
    "too much": ("2 BaO 1 TiO2 to 1 at 1400 <eos>", "not balanced in Ba"),
    "gas forgotten": ("1 BaCO3 1 TiO2 to 1 at 1400 <eos>", "C has no place"),
    "gas from nowhere": ("1 BaO 1 TiO2 to 1 and 1 CO2 at 1400 <eos>", "not balanced in C"),
}


@pytest.fixture(scope="module")
def planning(cache_dir: Path) -> SynthesisTask:
    return SynthesisTask.create(0, cache_dir, {})


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("name", INVALID)
def test_bad_answers_are_invalid_with_a_reason(verifier: Any, name: str) -> None:
    answer, reason = INVALID[name]
    start = time.process_time()
    (grade,) = verifier.grade(TITANATE, [answer])
    assert (grade.outcome, grade.reward) == ("invalid", 0.0)
    assert reason in grade.detail["reason"]
    assert len(grade.detail["reason"]) < 200
    assert time.process_time() - start < 20, "a guard against hanging"


def test_100_megabytes_are_refused_unread() -> None:
    (grade,) = RuleVerifier().grade(TITANATE, ["1 BaO " * 17_000_000])
    assert grade.outcome == "invalid"
    assert "102000000 characters" in grade.detail["reason"]


@pytest.mark.parametrize("verifier", VERIFIERS[1:], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("name", UNBALANCED)
def test_an_unbalanced_reaction_is_invalid(verifier: Any, name: str) -> None:
    answer, reason = UNBALANCED[name]
    (grade,) = verifier.grade(TITANATE, [answer])
    assert grade.outcome == "invalid"
    assert reason in grade.detail["reason"]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_a_right_recipe_earns_all_and_a_missing_powder_nothing(verifier: Any) -> None:
    right, double, missing = verifier.grade(
        {**TITANATE, "available": ["BaCO3", "TiO2"]},
        [RIGHT, "2 TiO2 2 BaCO3 to 2 and 2 CO2 at 1400 <eos>", "1 BaO 1 TiO2 to 1 at 1400 <eos>"],
    )
    assert right.reward == double.reward == 1.0
    assert (missing.outcome, missing.reward) == ("scored", 0.0)
    assert missing.detail["gate"] == "not available: BaO"
    keys = [
        verifier.canonical(TITANATE, RIGHT),
        verifier.canonical(TITANATE, "2 TiO2 2 BaCO3 to 2 and 2 CO2 at 1400 <eos>"),
    ]
    assert keys[0] == keys[1] is not None
    assert verifier.canonical(TITANATE, RIGHT.replace("1400", "1450")) != keys[0]
    assert verifier.canonical(TITANATE, "nothing") is None


def test_barium_titanate_from_its_oxides_gives_133_kj_per_mol() -> None:
    energy = thermo.reaction_energy({"BaO": 1, "TiO2": 1}, thermo.solids()["BaTiO3"], 1, {}, 1000.0)
    assert energy * 5 * thermo.KJ_PER_MOL_IN_EV == pytest.approx(-133, abs=3)


def test_gases_leave_more_readily_when_it_is_hot() -> None:
    reaction = ({"BaCO3": 1.0, "TiO2": 1.0}, thermo.solids()["BaTiO3"], 1.0, {"CO2": 1.0})
    cold, hot = (thermo.reaction_energy(*reaction, kelvin) for kelvin in (300.0, 1400.0))
    assert cold > 0 > hot
    assert thermo.gas_spread("CO2") * thermo.KJ_PER_MOL_IN_EV < 20


def test_a_reaction_that_does_not_go_earns_nothing() -> None:
    cold, hot = FullVerifier().grade(TITANATE, [RIGHT.replace("1400", "300"), RIGHT])
    assert cold.detail["energy_ev_per_atom"] > 0.03
    assert (cold.outcome, cold.reward, hot.reward) == ("scored", 0.0, 1.0)


def test_another_product_of_the_same_powders_costs_the_margin() -> None:
    payload = {"target": "Sr2TiO4", "available": ["SrO", "TiO2"]}
    (grade,) = FullVerifier().grade(payload, ["2 SrO 1 TiO2 to 1 at 1500 <eos>"])
    assert grade.detail["rival"] == "SrTiO3"
    assert grade.detail["margin_ev_per_atom"] < 0
    assert 0.5 < grade.reward < 0.95
    rival = thermo.best_competitor(["BaO", "TiO2"], "BaTiO3", 1400.0)
    assert rival is None, "no other barium titanate is in the table"


def test_temperatures_far_from_melting_points_are_implausible() -> None:
    powders = ["BaCO3", "TiO2"]
    assert plausibility(1400, powders) == 1.0
    assert plausibility(600, powders) == plausibility(3000, powders) == 0.0
    assert 0 < plausibility(950, powders) < 1
    rewards = [
        SurrogateVerifier().grade(TITANATE, [RIGHT.replace("1400", kelvin)])[0].reward for kelvin in ("600", "1400")
    ]
    assert rewards == [0.8, 1.0]


def test_every_target_has_a_usual_recipe_in_the_words_of_the_task(planning: SynthesisTask) -> None:
    known = set(planning.words)
    assert len(known) == len(planning.words)
    assert set(FORMULAS) == set(thermo.solids())
    full = FullVerifier()
    for target in TARGETS:
        words = format_recipe(usual_recipe(target, ()))
        assert set(words) <= known, target
        assert len(words) <= planning.max_answer_words
        (grade,) = full.grade({"target": target, "available": sorted(PRECURSORS)}, [words])
        assert grade.reward > 0.6, (target, grade)
        json.dumps(dict(grade.detail))


def test_problems_strike_out_powders_but_leave_a_way(planning: SynthesisTask, cache_dir: Path) -> None:
    again = SynthesisTask.create(0, cache_dir, {})
    for split in SPLITS:
        for index in range(60):
            problem = planning.problem(split, index)
            assert problem == again.problem(split, index)
            assert len(planning.prompt_words(problem)) == 9
            assert set(planning.prompt_words(problem)) | set(planning.answer_words(problem)) <= set(planning.words)
            (grade,) = SurrogateVerifier().grade(planning.truth(problem), [planning.answer_words(problem)])
            assert grade.reward == 1.0, (problem, grade)
    trained, held = planning.parts
    assert not set(trained) & set(held)
    assert {planning.problem("heldout", index).target for index in range(200)} == set(held)
    with pytest.raises(InvalidOption, match="max_struck"):
        create_task("synthesis-planning", 0, cache_dir, {"max_struck": 9})


def test_a_constant_answer_earns_next_to_nothing(planning: SynthesisTask) -> None:
    for verifier in VERIFIERS:
        grades = [verifier.grade(planning.truth(planning.problem("train", i)), [RIGHT])[0].reward for i in range(60)]
        assert sum(grades) / len(grades) < 0.1


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from([*RIGHT.split(), "BaO", "2", "1/2", "H2O", "x", "<pad>"]), max_size=14))
def test_any_words_are_graded(words: list[str]) -> None:
    (grade,) = FullVerifier().grade(TITANATE, [words])
    assert 0 <= grade.reward <= 1
    assert grade.outcome == "scored" or grade.detail["reason"]


@given(st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_any_multiple_of_a_balanced_reaction_balances(numerator: int, denominator: int) -> None:
    factor = str(Fraction(numerator, denominator))
    recipe = parse_answer(f"{factor} BaCO3 {factor} TiO2 to {factor} and {factor} CO2 at 1400 <eos>")
    check_balance(recipe, "BaTiO3")


def test_formulas_are_read_as_written() -> None:
    assert atoms_of("Mg(OH)2") == {"H": 2, "Mg": 1, "O": 2}
    assert atoms_of("Ti2O4") == {"O": 4, "Ti": 2}


def test_a_payload_of_another_task_is_an_error() -> None:
    for payload in ({}, {"target": "x y", "available": []}, {"target": "BaTiO3", "available": ["Unobtainium"]}):
        with pytest.raises(ValueError, match="not a payload"):
            parse_truth(payload)
    with pytest.raises(ValueError, match="no energy"):
        FullVerifier().grade({"target": "BaZnO2", "available": sorted(PRECURSORS)}, ["1 BaO 1 ZnO to 1 at 1300 <eos>"])


MAGNESIA = "MgO\n4.2\n0 .5 .5\n.5 0 .5\n.5 .5 0\nMg O\n1 1\nDirect\n0 0 0\n.5 .5 .5\n"
"""POSCAR of rock salt, 0.01 A from where CHGNet puts it."""


def test_a_target_that_the_table_lacks_is_relaxed_from_its_structure() -> None:
    pytest.importorskip("chgnet")
    payload = {"target": "Mg2O2", "available": ["MgCO3"], "structure": MAGNESIA}
    (grade,) = FullVerifier().grade(payload, ["2 MgCO3 to 1 and 2 CO2 at 2000 <eos>"])
    known = thermo.reaction_energy({"MgCO3": 1}, thermo.solids()["MgO"], 1, {"CO2": 1}, 2000)
    assert grade.detail["energy_ev_per_atom"] == pytest.approx(known, abs=0.002)
    with pytest.raises(ValueError, match="the structure is MgO, not CaO2"):
        computed_substance("CaO2", MAGNESIA)
    with pytest.raises(ValueError, match="needs 3 finite"):
        FullVerifier().grade({**payload, "structure": "MgO\n1\n"}, ["2 MgCO3 to 1 and 2 CO2 at 2000 <eos>"])


def test_figures_count_what_is_not_balanced_as_missed() -> None:
    good = Grade("scored", 1.0, {"energy_ev_per_atom": -0.1, "margin_ev_per_atom": 0.05})
    uphill = Grade("scored", 0.0, {"energy_ev_per_atom": 0.1, "margin_ev_per_atom": -0.05})
    figures = synthesis_figures(
        [[good, uphill], [uphill, good], [Grade("invalid", 0.0), good], [Grade("invalid", 0.0)]]
    )
    assert (figures.balanced, figures.downhill, figures.selective, figures.balanced_at_n) == (0.5, 0.25, 0.25, 0.75)
