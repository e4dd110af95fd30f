"""Charge balance and electronegativity test of a composition by SMACT.

D. W. Davies et al., SMACT: Semiconducting Materials by Analogy and Chemical Theory, J. Open Source Softw. 4, 1361
(2019). Elements and metals only pass by default.
"""

import functools
import math

from reflux_tasks.chemistry.mlip import WAY_OUT
from reflux_tasks.verify import VerifierUnavailable

MAX_COMBINATIONS = 10_000_000
"""Product of the numbers of oxidation states beyond which the enumeration would hang (the cap of CrystaLLM)."""
MAX_STOICHIOMETRY = 1000


@functools.lru_cache(maxsize=4096)
def charge_balanced(formula: str) -> bool:
    """Whether SMACT finds oxidation states that balance; False for a composition too large to enumerate.

    `formula` such as "BaTiO3". Raises VerifierUnavailable without SMACT, ValueError for what is no formula.
    """
    from pymatgen.core import Composition

    try:
        from smact import Element
        from smact.screening import smact_validity
    except ImportError as error:
        raise VerifierUnavailable(f"cannot import {error.name or error}; {WAY_OUT}") from error
    composition = Composition(formula)
    reduced, _ = composition.get_integer_formula_and_factor()
    counts = Composition(reduced).as_dict()
    if max(counts.values()) > MAX_STOICHIOMETRY:
        return False
    states = [len(Element(symbol).oxidation_states or ()) for symbol in counts]
    if math.prod(max(1, number) for number in states) > MAX_COMBINATIONS:
        return False
    return bool(smact_validity(reduced))


def prepare() -> None:
    """Loads SMACT's tables now; raises VerifierUnavailable."""
    charge_balanced("NaCl")
