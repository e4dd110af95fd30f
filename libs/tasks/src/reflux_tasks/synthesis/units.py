"""Atoms of formulas as whole numbers, read once. Standard library only."""

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

from reflux_tasks.canonical import reduced_formula

_PART = re.compile(r"([A-Z][a-z]?)([0-9]+)")


@functools.lru_cache(maxsize=512)
def atoms_of(formula: str) -> Mapping[str, int]:
    """Atoms per formula unit as written; raises ValueError for what is no formula of whole amounts."""
    text, units = reduced_formula(formula)
    if units.denominator != 1:
        raise ValueError(f"{formula} has amounts that are not whole")
    return MappingProxyType({element: int(count) * int(units) for element, count in _PART.findall(text)})
