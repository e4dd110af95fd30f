"""The rule verifier: compares the named phases with the true ones. Standard library only."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, TierName, Verifier, answer_words
from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.answers import parse_answer

EXTRA_PENALTY = 0.2


class LabelVerifier(Verifier):
    """Reward max(0, (hits - 0.2 * extras) / n_true).

    hits = true phases named; extras = all other phases named: wrong ones, repetitions, phases that no database has, and
    phases with an element outside the prompt's list. An answer against the grammar is `invalid`.
    """

    name: ClassVar[str] = "label"
    version: ClassVar[str] = "label-1"
    fidelity: ClassVar[Fidelity] = "rule"
    trusted: ClassVar[bool] = True
    weakest_tier: ClassVar[TierName] = "process"
    cost_seconds: ClassVar[float] = 1e-5
    canonical_form: ClassVar[Form] = "parts"

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        try:
            true_labels = {phase["label"] for phase in payload["phases"]}
            allowed = frozenset(payload["elements"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a payload of this task: {error!r}") from error
        if not true_labels:
            raise ValueError("a payload needs at least one true phase")
        return [_grade(answer_words(answer), true_labels, allowed) for answer in answers]


def _grade(words: Sequence[str], true_labels: set[str], allowed: frozenset[str]) -> Grade:
    try:
        named = parse_answer(words)
    except InvalidAnswer as error:
        return Grade("invalid", 0.0, {"reason": str(error)})
    hits = len(true_labels & {phase.text for phase in named})
    extras = len(named) - hits
    foreign = sorted({element for phase in named for element in phase.elements - allowed})
    detail = {
        "hits": hits,
        "extras": extras,
        "n_true": len(true_labels),
        "exact": hits == len(true_labels) and extras == 0,
        "foreign_elements": foreign,
    }
    return Grade("scored", max(0.0, (hits - EXTRA_PENALTY * extras) / len(true_labels)), detail)
