"""The answer grammar: formula, space group, free cell parameters, one row per site, `<eos>`.

    answer     = formula "sgN" parameters site { site } "<eos>" { "<pad>" }
    formula    = element [ "nK" ] { element [ "nK" ] }              K >= 2, no element twice
    parameters = those that the crystal system leaves free, in the order a b c alpha beta gamma (angstrom, degrees)
    site       = element coordinate coordinate coordinate           decimals or fractions such as 1/3

Rutile: `Ti O n2 sg136 4.59 2.96 Ti 0 0 0 O 0.305 0.305 0 <eos>`. The setting is that of chemistry/symmetry.py. Any
structure can be written in `sg1` too. Standard library only, apart from what `expand` makes of an answer.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from reflux_tasks.chemistry.sanity import MAX_ATOMS, cell_problem, structure_problem
from reflux_tasks.chemistry.symmetry import CELL_PARAMETERS, cell_vectors, crystal_system, orbit
from reflux_tasks.verify import Answer
from reflux_tasks.wording import InvalidAnswer, bounded_words
from reflux_tasks.xrd.answers import ELEMENTS

MAX_WORDS = 1024
MAX_CHARACTERS = 16_384
"""Longer answers are refused unread."""
MAX_FORMULA_ELEMENTS = 8
_COUNT = re.compile(r"n([2-9]|[1-9][0-9]{1,2})")
_SPACE_GROUP = re.compile(r"sg([1-9][0-9]{0,2})")
_LENGTH = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,6})?")
_COORDINATE = re.compile(r"-?[0-9](?:\.[0-9]{1,6})?")
_FRACTION = re.compile(r"([0-9]{1,3})/([1-9][0-9]{0,2})")


@dataclass(frozen=True)
class ProposedCrystal:
    """A structure as an answer writes it."""

    amounts: dict[str, int]
    """Atoms per formula unit by element, as small as possible."""
    space_group: int
    parameters: tuple[float, ...]
    sites: tuple[tuple[str, tuple[float, float, float]], ...]


def parse_answer(answer: Answer) -> ProposedCrystal:
    """Raises InvalidAnswer that says where the grammar is broken."""
    words = bounded_words(answer, MAX_CHARACTERS, MAX_WORDS)
    place = next((i for i, word in enumerate(words) if _SPACE_GROUP.fullmatch(word)), None)
    if place is None or int(words[place][2:]) > 230:
        raise InvalidAnswer("no space group sg1 to sg230")
    space_group = int(words[place][2:])
    amounts = _formula(words[:place])
    count = len(CELL_PARAMETERS[crystal_system(space_group)])
    given, rest = words[place + 1 : place + 1 + count], words[place + 1 + count :]
    if len(given) < count or len(rest) % 4 or not rest:
        raise InvalidAnswer(f"{words[place]} needs {count} cell parameters, then sites of four words")
    parameters = tuple(_number(word, _LENGTH, "cell parameter") for word in given)
    return ProposedCrystal(amounts, space_group, parameters, tuple(_site(rest[i : i + 4]) for i in _starts(rest)))


def _starts(rest: Sequence[str]) -> range:
    return range(0, len(rest), 4)


def _formula(words: Sequence[str]) -> dict[str, int]:
    amounts: dict[str, int] = {}
    last = ""
    for word in words:
        if word in ELEMENTS and word not in amounts:
            amounts[word], last = 1, word
        elif (count := _COUNT.fullmatch(word)) and last:
            amounts[last], last = int(count[1]), ""
        else:
            raise InvalidAnswer(f"{word[:20]!r} is out of place in the formula")
    if not 1 <= len(amounts) <= MAX_FORMULA_ELEMENTS:
        raise InvalidAnswer(f"a formula has 1 to {MAX_FORMULA_ELEMENTS} elements")
    divisor = math.gcd(*amounts.values())
    return {element: count // divisor for element, count in amounts.items()}


def _number(word: str, pattern: re.Pattern[str], what: str) -> float:
    if not pattern.fullmatch(word):
        raise InvalidAnswer(f"{word[:20]!r} is no {what}")
    return float(word)


def _site(words: Sequence[str]) -> tuple[str, tuple[float, float, float]]:
    if words[0] not in ELEMENTS:
        raise InvalidAnswer(f"{words[0][:20]!r} is no element of a site")
    x, y, z = (_coordinate(word) for word in words[1:])
    return words[0], (x, y, z)


def _coordinate(word: str) -> float:
    if fraction := _FRACTION.fullmatch(word):
        return float(Fraction(int(fraction[1]), int(fraction[2])))
    return _number(word, _COORDINATE, "coordinate")


def expand(crystal: ProposedCrystal) -> Any:
    """pymatgen Structure of the whole cell; raises InvalidAnswer for a cell, distances or sites that cannot be."""
    from pymatgen.core import Lattice, Structure

    if any(value <= 0 for value in crystal.parameters):
        raise InvalidAnswer("a cell parameter is zero")
    try:
        vectors = cell_vectors(crystal.space_group, crystal.parameters)
    except ValueError as error:
        raise InvalidAnswer(str(error)) from None
    lattice = Lattice(vectors)
    volume = abs(float(np.linalg.det(vectors)))
    problem = cell_problem(np.array(lattice.abc), np.array(lattice.angles), volume, len(crystal.sites))
    if problem:
        raise InvalidAnswer(problem)
    species: list[str] = []
    atoms: list[np.ndarray] = []
    for element, coords in crystal.sites:
        images = orbit(np.array(coords), vectors, crystal.space_group)
        species += [element] * len(images)
        atoms.append(images)
        if len(species) > MAX_ATOMS:
            raise InvalidAnswer(f"more than {MAX_ATOMS} atoms in the cell")
    _check_formula(species, crystal.amounts)
    structure = Structure(lattice, species, np.concatenate(atoms))
    if problem := structure_problem(structure):
        raise InvalidAnswer(problem)
    return structure


def _check_formula(species: Sequence[str], amounts: dict[str, int]) -> None:
    counts = Counter(species)
    divisor = math.gcd(*counts.values())
    found = {element: count // divisor for element, count in counts.items()}
    if found != amounts:
        made = " ".join(f"{element}{count}" for element, count in sorted(found.items()))
        raise InvalidAnswer(f"the sites make {made}, not what the formula says")


def formula_words(amounts: dict[str, int]) -> list[str]:
    """Words of a composition, such as Ti O n2."""
    words: list[str] = []
    for element, count in amounts.items():
        words += [element] if count == 1 else [element, f"n{count}"]
    return words
