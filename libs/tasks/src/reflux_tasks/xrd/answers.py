"""The answer grammar: phases separated by `<sep>`, then `<eos>`; a phase is its formula in words and `sgNNN`.

    answer = phase { "<sep>" phase } "<eos>" { "<pad>" }
    phase  = element [ "nK" ] { element [ "nK" ] } "sgN"       K >= 2, 1 <= N <= 230, no element twice

Longer answers than MAX_WORDS are refused unread. Standard library only, because every sandbox child loads it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reflux_tasks.canonical import END, MAX_WORDS, SEPARATOR, split_parts
from reflux_tasks.wording import InvalidAnswer, words_before_end

_ELEMENT_TABLE = """
H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb
Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu
Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr
"""
ELEMENTS = frozenset(_ELEMENT_TABLE.split())
_COUNT = re.compile(r"n([2-9]|[1-9][0-9]{1,2})")
_SPACE_GROUP = re.compile(r"sg([1-9][0-9]{0,2})")


@dataclass(frozen=True)
class NamedPhase:
    """A phase as an answer names it."""

    label: tuple[str, ...]

    @property
    def elements(self) -> frozenset[str]:
        return frozenset(self.label) & ELEMENTS

    @property
    def text(self) -> str:
        return " ".join(self.label)


def parse_answer(words: Sequence[str]) -> list[NamedPhase]:
    """Phases of an answer in their order, duplicates kept; raises InvalidAnswer."""
    return [_parse_phase(part) for part in split_parts(words_before_end(words, MAX_WORDS))]


def _parse_phase(words: Sequence[str]) -> NamedPhase:
    text = " ".join(words) or "nothing"
    space_group = _SPACE_GROUP.fullmatch(words[-1]) if words else None
    if space_group is None or int(space_group[1]) > 230:
        raise InvalidAnswer(f"{text!r} does not end in a space group")
    formula = words[:-1]
    elements = [word for word in formula if word in ELEMENTS]
    if not elements or len(set(elements)) != len(elements):
        raise InvalidAnswer(f"{text!r} needs elements, each once")
    for before, word in zip((None, *formula), formula, strict=False):
        if word not in ELEMENTS and not (_COUNT.fullmatch(word) and before in ELEMENTS):
            raise InvalidAnswer(f"{word!r} is out of place in {text!r}")
    return NamedPhase(tuple(words))


def format_answer(labels: Sequence[Sequence[str]]) -> list[str]:
    """Words of the answer that names these phases, strongest first."""
    words: list[str] = []
    for label in labels:
        words += [*([SEPARATOR] if words else []), *label]
    return [*words, END]
