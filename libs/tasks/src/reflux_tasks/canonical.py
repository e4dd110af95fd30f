"""Canonical text of answers: equal keys must mean equal grades; a missed equality only costs a second grading.

Standard library only and linear in the length of an answer, because the sandbox service runs the text forms on what a
model wrote, in its own process. What takes more than that runs in a child (`Verifier.canonical_form` "own").
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Literal, get_args

END, SEPARATOR, PAD = "<eos>", "<sep>", "<pad>"
MAX_WORDS = 128
"""Longer answers are not taken apart: a parser may refuse them unread."""
MAX_FORMULA_CHARACTERS = 256
_MAX_AMOUNT = 10**6
_MAX_DEPTH = 8

TextForm = Literal["exact", "words", "parts"]
Form = Literal["exact", "words", "parts", "own"]
"""exact: the text itself. words: all white space means one space. parts: also, the parts that `<sep>` divides before
`<eos>` mean the same in any order, but a repeated part counts. own: `Verifier.canonical`, which runs in a child."""
FORMS: tuple[Form, ...] = get_args(Form)

_TOKEN = re.compile(r"([A-Z][a-z]?)|([(\[])|([)\]])|([0-9]+(?:\.[0-9]+)?)")


def text_form(form: TextForm, answer: str) -> str:
    """The canonical text of an answer. Never raises: what has no other form is its own words."""
    if form == "exact":
        return answer
    words = answer.split()
    if form == "parts" and len(words) <= MAX_WORDS and END in words:
        end = words.index(END)
        if all(word == PAD for word in words[end + 1 :]):
            words = [*_sorted_parts(words[:end]), END]
    return " ".join(words)


def split_parts(words: Sequence[str]) -> list[list[str]]:
    """The parts between separators, at least one; any of them may be empty."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _sorted_parts(words: list[str]) -> list[str]:
    first, *rest = sorted(split_parts(words))
    return [*first, *(word for part in rest for word in (SEPARATOR, *part))]


def reduced_formula(formula: str) -> tuple[str, Fraction]:
    """Elements by name with their smallest whole amounts, and how many of that unit the formula is.

    ("O2Ti1", 2) for "Ti2O4". Raises ValueError for anything but elements, brackets and positive amounts up to 10^6.
    """
    amounts = _parse_formula(formula)
    denominator = lcm(*(amount.denominator for amount in amounts.values()))
    whole = {element: int(amount * denominator) for element, amount in amounts.items()}
    divisor = gcd(*whole.values())
    text = "".join(f"{element}{count // divisor}" for element, count in sorted(whole.items()))
    return text, Fraction(divisor, denominator)


def _parse_formula(formula: str) -> dict[str, Fraction]:
    if not formula or len(formula) > MAX_FORMULA_CHARACTERS:
        raise ValueError(f"a formula has 1 to {MAX_FORMULA_CHARACTERS} characters, got {len(formula)}")
    tokens, position = [], 0
    while position < len(formula):
        if (match := _TOKEN.match(formula, position)) is None:
            raise ValueError(f"{formula[position]!r} has no place in the formula {formula[:40]!r}")
        tokens.append(match)
        position = match.end()
    stack: list[dict[str, Fraction]] = [{}]
    for index, token in enumerate(tokens):
        following = tokens[index + 1][4] if index + 1 < len(tokens) else None
        times = _amount(following) if following else Fraction(1)
        element, opening, closing, number = token.groups()
        if opening:
            stack.append({})
        elif element:
            stack[-1][element] = stack[-1].get(element, Fraction(0)) + times
        elif closing and len(stack) > 1:
            for name, amount in stack.pop().items():
                stack[-1][name] = stack[-1].get(name, Fraction(0)) + amount * times
        elif not number or index == 0 or not (tokens[index - 1][1] or tokens[index - 1][3]):
            raise ValueError(f"{token[0]!r} has no place in the formula {formula[:40]!r}")
        if len(stack) > _MAX_DEPTH:
            raise ValueError(f"the formula {formula[:40]!r} is nested too deeply")
    if len(stack) > 1 or not stack[0]:
        raise ValueError(f"the formula {formula[:40]!r} is not complete")
    return stack[0]


def _amount(text: str) -> Fraction:
    value = Fraction(text) if len(text) <= 12 else Fraction(0)
    if not 0 < value <= _MAX_AMOUNT:
        raise ValueError(f"the amount {text[:20]} is not above 0 and at most {_MAX_AMOUNT}")
    return value


def formula_set_key(formulas: list[str]) -> str:
    """Key of a set of substances whose order, units and repetitions mean nothing. Raises ValueError."""
    return "+".join(sorted({reduced_formula(formula)[0] for formula in formulas}))


def reaction_key(reactants: Mapping[str, float | Fraction], products: Mapping[str, float | Fraction]) -> str:
    """Key of a reaction: sides sorted, formulas reduced, the coefficients the smallest whole numbers of this ratio.

    Substances stay on the side that they are written on, and a substance on both sides stays on both: leaving it out
    would be another reaction to a grade that counts precursors. Raises ValueError.
    """
    sides = [_side(reactants), _side(products)]
    values = [value for side in sides for value in side.values()]
    if not values:
        raise ValueError("a reaction without substances")
    scale = Fraction(lcm(*(value.denominator for value in values)))
    divisor = gcd(*(int(value * scale) for value in values))
    texts = [" + ".join(f"{value * scale / divisor} {name}" for name, value in sorted(side.items())) for side in sides]
    return " = ".join(texts)


def _side(coefficients: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    side: dict[str, Fraction] = {}
    for formula, coefficient in coefficients.items():
        name, units = reduced_formula(formula)
        side[name] = side.get(name, Fraction(0)) + _amount(str(coefficient)) * units
    return side
