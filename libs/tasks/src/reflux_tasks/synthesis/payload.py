"""What the verifiers are told about a problem, and the gates that every recipe must pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reflux_tasks import progress
from reflux_tasks.canonical import reaction_key, reduced_formula
from reflux_tasks.synthesis.answers import Recipe, parse_answer
from reflux_tasks.synthesis.shelf import PRECURSORS
from reflux_tasks.synthesis.units import atoms_of
from reflux_tasks.verify import Answer, Grade
from reflux_tasks.wording import InvalidAnswer


@dataclass(frozen=True)
class Truth:
    """The target and what may be taken from the shelf."""

    target: str
    available: frozenset[str]
    structure: str = ""
    """CIF or POSCAR of the target, for one that the table of energies lacks."""


def parse_truth(payload: Mapping[str, Any]) -> Truth:
    """Raises ValueError for anything that is not a payload of this task."""
    try:
        truth = Truth(str(payload["target"]), frozenset(payload["available"]), str(payload.get("structure", "")))
        reduced_formula(truth.target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a payload of this task: {error!r}") from error
    if not truth.available <= set(PRECURSORS):
        raise ValueError("not a payload of this task: an available precursor is not on the shelf")
    return truth


def check_elements(recipe: Recipe, target: str) -> None:
    """Raises InvalidAnswer when precursors bring an element that target and gases lack, or fail to bring one."""
    wanted = set(atoms_of(target))
    brought = {element for name, _ in recipe.precursors for element in atoms_of(name)}
    leaving = {element for name, _ in recipe.gases for element in atoms_of(name)}
    if missing := wanted - brought:
        raise InvalidAnswer(f"no precursor brings {', '.join(sorted(missing))}")
    if foreign := brought - wanted - leaving:
        raise InvalidAnswer(f"{', '.join(sorted(foreign))} has no place to go")


def check_balance(recipe: Recipe, target: str) -> None:
    """Raises InvalidAnswer unless every element balances exactly."""
    balance: dict[str, Fraction] = {}
    products = [(target, recipe.target_amount), *recipe.gases]
    for sign, side in ((1, recipe.precursors), (-1, products)):
        for name, amount in side:
            for element, count in atoms_of(name).items():
                balance[element] = balance.get(element, Fraction(0)) + sign * amount * count
    open_elements = sorted(element for element, rest in balance.items() if rest)
    if open_elements:
        raise InvalidAnswer(f"not balanced in {', '.join(open_elements)}")


def grade_recipes(truth: Truth, answers: Sequence[Answer], score: Callable[[Recipe], Grade]) -> list[Grade]:
    """Grades what parses and brings the target's elements; a precursor that is not available scores 0."""
    grades = []
    for answer in progress.tracked(answers):
        try:
            recipe = parse_answer(answer)
            check_elements(recipe, truth.target)
            missing = sorted({name for name, _ in recipe.precursors} - truth.available)
            gate = f"not available: {', '.join(missing)}"
            grades.append(Grade("scored", 0.0, {"gate": gate, "exact": 0}) if missing else score(recipe))
        except InvalidAnswer as error:
            grades.append(Grade("invalid", 0.0, {"reason": str(error), "exact": 0}))
    return grades


def canonical_text(payload: Mapping[str, Any], answer: Answer) -> str | None:
    """The reaction with smallest whole amounts, whatever the order and multiple, and the temperature."""
    try:
        target = parse_truth(payload).target
        recipe = parse_answer(answer)
        products = {target: recipe.target_amount, **dict(recipe.gases)}
        return f"{reaction_key(dict(recipe.precursors), products)} @ {recipe.kelvin}"
    except (InvalidAnswer, ValueError):
        return None
