"""The answer grammar: precursors with amounts, what comes out, and a temperature.

    answer      = precursors "to" amount [ gas ] "at" kelvin "<eos>" { "<pad>" }
    precursors  = amount precursor { amount precursor }
    gas         = { "and" amount gas }
    amount      = whole number or fraction such as 1/2, above 0 and at most 99

The first amount after "to" is that of the target: `1 BaCO3 1 TiO2 to 1 and 1 CO2 at 1400 <eos>`. Standard library only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from reflux_tasks.canonical import END
from reflux_tasks.synthesis.shelf import GASES, PRECURSORS
from reflux_tasks.verify import Answer
from reflux_tasks.wording import InvalidAnswer, bounded_words

TO, AND, AT = "to", "and", "at"
MAX_WORDS = 64
MAX_CHARACTERS = 2048
"""Longer answers are refused unread."""
MAX_PRECURSORS = 6
MAX_KELVIN = 3500
_AMOUNT = re.compile(r"([1-9][0-9]?)(?:/([1-9][0-9]?))?")
_KELVIN = re.compile(r"[1-9][0-9]{2,3}")


@dataclass(frozen=True)
class Recipe:
    """What an answer proposes for one target."""

    precursors: tuple[tuple[str, Fraction], ...]
    target_amount: Fraction
    gases: tuple[tuple[str, Fraction], ...]
    kelvin: int


def parse_answer(answer: Answer) -> Recipe:
    """Raises InvalidAnswer that says where the grammar is broken."""
    words = bounded_words(answer, MAX_CHARACTERS, MAX_WORDS)
    for mark in (TO, AT):
        if words.count(mark) != 1:
            raise InvalidAnswer(f"the word {mark!r} is needed once")
    to, at = words.index(TO), words.index(AT)
    if at != len(words) - 2 or to > at:
        raise InvalidAnswer(f"{AT!r} and a temperature come last")
    precursors = _pairs(words[:to], frozenset(PRECURSORS), "precursor on the list")
    if not 1 <= len(precursors) <= MAX_PRECURSORS:
        raise InvalidAnswer(f"{len(precursors)} precursors, 1 to {MAX_PRECURSORS} are read")
    products = words[to + 1 : at]
    if not products or len(products) % 3 != 1 or any(word != AND for word in products[1::3]):
        raise InvalidAnswer(f"products are an amount, then {AND!r}, amount and gas for each gas")
    gases = [word for i, word in enumerate(products) if i and i % 3 != 1]
    return Recipe(precursors, _amount(products[0]), _pairs(gases, frozenset(GASES), "gas"), _kelvin(words[at + 1]))


def _pairs(words: Sequence[str], known: frozenset[str], what: str) -> tuple[tuple[str, Fraction], ...]:
    if len(words) % 2:
        raise InvalidAnswer("amounts and substances come in pairs")
    pairs = [(words[i + 1], _amount(words[i])) for i in range(0, len(words), 2)]
    for name, _ in pairs:
        if name not in known:
            raise InvalidAnswer(f"{name[:20]!r} is no {what}")
    if len(dict(pairs)) < len(pairs):
        raise InvalidAnswer(f"a {what} twice")
    return tuple(pairs)


def _amount(word: str) -> Fraction:
    found = _AMOUNT.fullmatch(word)
    if found is None:
        raise InvalidAnswer(f"{word[:20]!r} is no amount")
    return Fraction(int(found[1]), int(found[2] or 1))


def _kelvin(word: str) -> int:
    if not _KELVIN.fullmatch(word) or int(word) > MAX_KELVIN:
        raise InvalidAnswer(f"{word[:20]!r} is no temperature from 100 to {MAX_KELVIN} K")
    return int(word)


def format_recipe(recipe: Recipe) -> list[str]:
    """Words of a recipe, end word included."""
    words = [word for name, amount in recipe.precursors for word in (str(amount), name)]
    words += [TO, str(recipe.target_amount)]
    words += [word for name, amount in recipe.gases for word in (AND, str(amount), name)]
    return [*words, AT, str(recipe.kelvin), END]
