"""Rule, surrogate and full verifier of recipes; density functional theory is in dft.py."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from reflux_tasks.canonical import Form
from reflux_tasks.chemistry import charges
from reflux_tasks.synthesis import thermo
from reflux_tasks.synthesis.answers import Recipe
from reflux_tasks.synthesis.computed import computed_substance
from reflux_tasks.synthesis.payload import Truth, canonical_text, check_balance, grade_recipes, parse_truth
from reflux_tasks.synthesis.temperature import plausibility
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier
from reflux_tasks.wording import InvalidAnswer

ERROR_EV_PER_ATOM = 0.03
"""What CHGNet's energies are worth: about its mean absolute error on its test set."""
MARGIN_EV_PER_ATOM = 0.05
TEMPERATURE_SHARE = 0.2
"""Of a reward. Small, because the window of temperatures is a rule of thumb (temperature.py)."""


class RuleVerifier(Verifier):
    """Reward 1 when all precursors are available and bring the target's elements and nothing else, 0 otherwise.

    Amounts and temperature do not count yet. What does not parse, or brings an element too many or too few, is
    `invalid`.
    """

    name: ClassVar[str] = "rule"
    version: ClassVar[str] = "synthesis-rule-1"
    fidelity: ClassVar[Fidelity] = "rule"
    trusted: ClassVar[bool] = True
    cost_seconds: ClassVar[float] = 1e-4
    weakest_tier: ClassVar[Literal["process", "prefork", "bwrap", "gvisor"]] = "process"
    canonical_form: ClassVar[Form] = "own"

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        return canonical_text(payload, answer)

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        truth = parse_truth(payload)
        return grade_recipes(truth, answers, lambda recipe: self._score(truth, recipe))

    def _score(self, truth: Truth, recipe: Recipe) -> Grade:
        del truth
        return Grade("scored", 1.0, {"exact": 1, "precursors": len(recipe.precursors)})


class SurrogateVerifier(RuleVerifier):
    """Reward = gate * (0.8 + 0.2 T), T the plausibility of the temperature (temperature.py).

    The gate is the rule's and an exact balance of every element; pymatgen balances the reaction too and its equation is
    reported. SMACT of the target is reported and not rewarded: the target is given. Unbalanced is `invalid`.
    """

    name: ClassVar[str] = "surrogate"
    version: ClassVar[str] = "synthesis-surrogate-2"
    fidelity: ClassVar[Fidelity] = "surrogate"
    cost_seconds: ClassVar[float] = 2e-3

    def prepare(self) -> None:
        charges.prepare()

    def _score(self, truth: Truth, recipe: Recipe) -> Grade:
        check_balance(recipe, truth.target)
        plausible = plausibility(recipe.kelvin, (name for name, _ in recipe.precursors))
        detail = {
            "exact": int(plausible == 1.0),
            "equation": equation(truth, recipe),
            "smact": int(charges.charge_balanced(truth.target)),
            "temperature": round(plausible, 4),
        }
        return Grade("scored", round(1 - TEMPERATURE_SHARE + TEMPERATURE_SHARE * plausible, 4), detail)


class FullVerifier(SurrogateVerifier):
    """Reward = gate * D * (0.5 + 0.3 M + 0.2 T); the gate is the surrogate's.

    D = clip((0.03 - dG) / 0.06, 0, 1): dG is the free energy in eV per atom of reactants at the temperature, from
    CHGNet-relaxed phases (thermo.py; a target that the table lacks is relaxed now, computed.py); 0.03 is the error of
    the potential. M = clip(1 + m / 0.05, 0, 1) with the margin m = (dG of the best other phase that the same precursors
    can become) - dG.
    """

    name: ClassVar[str] = "full"
    version: ClassVar[str] = "synthesis-full-2"
    fidelity: ClassVar[Fidelity] = "full"
    cost_seconds: ClassVar[float] = 0.1

    def prepare(self) -> None:
        super().prepare()
        thermo.competitors()
        thermo.gases()

    def _score(self, truth: Truth, recipe: Recipe) -> Grade:
        detail = dict(super()._score(truth, recipe).detail)
        energy, further = self._energy(truth, recipe)
        names = [name for name, _ in recipe.precursors]
        rival = thermo.best_competitor(names, truth.target, recipe.kelvin)
        margin = MARGIN_EV_PER_ATOM if rival is None else rival.energy - energy
        driving = _clip((ERROR_EV_PER_ATOM - energy) / (2 * ERROR_EV_PER_ATOM))
        selective = _clip(1 + margin / MARGIN_EV_PER_ATOM)
        reward = driving * (0.5 + 0.3 * selective + TEMPERATURE_SHARE * detail["temperature"])
        detail |= {
            "exact": int(reward > 0.95),
            "energy_ev_per_atom": round(energy, 4),
            "margin_ev_per_atom": round(margin, 4),
            "rival": "none" if rival is None else rival.formula,
        }
        return Grade("scored", round(reward, 4), detail | further)

    def _energy(self, truth: Truth, recipe: Recipe) -> tuple[float, dict[str, Any]]:
        """Free energy in eV per atom of reactants, and figures."""
        reactants, gases = _floats(recipe.precursors), _floats(recipe.gases)
        amount = float(recipe.target_amount)
        energy = thermo.reaction_energy(reactants, target_of(truth), amount, gases, recipe.kelvin)
        return energy, {}


def target_of(truth: Truth) -> thermo.Substance:
    """The target from the table, or by CHGNet from the payload's structure; raises ValueError without either."""
    known = thermo.solids().get(truth.target)
    if known is None and not truth.structure:
        raise ValueError(f"not a payload of this task: no energy of {truth.target}; add its `structure` (CIF, POSCAR)")
    return known or computed_substance(truth.target, truth.structure)


def equation(truth: Truth, recipe: Recipe) -> str:
    """The reaction as pymatgen writes it; raises InvalidAnswer when pymatgen finds it unbalanced."""
    from pymatgen.analysis.reaction_calculator import BalancedReaction, ReactionError
    from pymatgen.core import Composition

    sides = (_floats(recipe.precursors), {truth.target: float(recipe.target_amount), **_floats(recipe.gases)})
    try:
        named: list[Any] = [{Composition(name): amount for name, amount in side.items()} for side in sides]
        return str(BalancedReaction(*named))
    except ReactionError as error:
        raise InvalidAnswer(f"not balanced: {error}") from error


def _floats(amounts: Sequence[tuple[str, Any]]) -> dict[str, float]:
    return {name: float(amount) for name, amount in amounts}


def _clip(value: float) -> float:
    return min(1.0, max(0.0, value))
