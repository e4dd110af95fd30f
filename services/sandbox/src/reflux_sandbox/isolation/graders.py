"""Warm side of verification: loads an installed task once, turns `Verifier.grade` into plain JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reflux_tasks.registry import create_task, task_names
from reflux_tasks.verify import Grade, VerificationError, Verifier, VerifierUnavailable

_MESSAGE_CHARACTERS = 500


def family_names() -> list[str]:
    """A family per installed task."""
    return task_names()


class LoadedVerifiers:
    """Verifiers of one installed task by "task/verifier"; `problems` says why it does not load, or a verifier."""

    def __init__(self, cache_folder: Path, family: str) -> None:
        self._verifiers: dict[str, Verifier] = {}
        self.problems: list[str] = []
        try:
            task = create_task(family, 0, cache_folder)
            self._verifiers = {f"{family}/{key}": verifier for key, verifier in task.verifiers.items()}
            self._prepare(self._verifiers)
        except Exception as error:  # task boundary: one broken plug-in must not take the others down
            self.problems.append(f"task {family} is not usable: {type(error).__name__}: {error}")

    def _prepare(self, verifiers: Mapping[str, Verifier]) -> None:
        """A verifier without its tool stays: its jobs end as infra_error with the way out."""
        for name, verifier in verifiers.items():
            try:
                verifier.prepare()
            except VerifierUnavailable as error:
                self.problems.append(f"verifier {name} is not usable: {error}")

    def rows(self) -> list[dict[str, Any]]:
        """Name, version, fidelity, trust, cost and canonical form of each verifier."""
        return [
            {
                "name": name,
                "version": verifier.version,
                "fidelity": verifier.fidelity,
                "trusted": verifier.trusted,
                "cost_seconds": verifier.cost_seconds,
                "weakest_tier": verifier.weakest_tier,
                "canonical_form": verifier.canonical_form,
            }
            for name, verifier in sorted(self._verifiers.items())
        ]

    def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """One JSON grade per answer, or an error for all: payload (never works), unavailable (not on this machine).

        A name that ends in "#canonical" asks for the canonical texts of the answers, None for those that have none.
        """
        name, _, wish = verifier.partition("#")
        if (found := self._verifiers.get(name)) is None:
            return {"error": "unavailable", "message": f"no verifier {name!r} in this child"}
        try:
            document = json.loads(payload)
            if wish == "canonical":
                return {"canonical": [found.canonical(document, answer) for answer in answers]}
            return {"grades": _grade_apart(found, document, answers)}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": "payload", "message": f"payload does not fit {verifier}: {type(error).__name__}: {error}"}
        except VerifierUnavailable as error:
            return {"error": "unavailable", "message": str(error)}


def _grade_apart(verifier: Verifier, document: Any, answers: list[str]) -> list[dict[str, Any]]:
    """Grades the group at once; when a tool fails, answer by answer, so that one failure does not hide the others."""
    try:
        grades = verifier.grade(document, answers)
    except VerificationError as error:
        if len(answers) == 1:
            return [
                {"outcome": "infra_error", "reward": 0.0, "figures": {}, "message": str(error)[:_MESSAGE_CHARACTERS]}
            ]
        return [row for answer in answers for row in _grade_apart(verifier, document, [answer])]
    if len(grades) != len(answers):
        raise RuntimeError(f"{len(grades)} grades for {len(answers)} answers")
    return [_plain(grade) for grade in grades]


def _plain(grade: Grade) -> dict[str, Any]:
    figures, message = _split(grade.detail)
    if not math.isfinite(grade.reward):
        return {
            "outcome": "infra_error",
            "reward": 0.0,
            "figures": figures,
            "message": f"reward {grade.reward} is not finite",
        }
    reward = float(grade.reward) if grade.outcome == "scored" else 0.0
    return {"outcome": grade.outcome, "reward": reward, "figures": figures, "message": message}


def _split(detail: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Finite numbers become figures, text becomes the message, anything else is left out."""
    figures: dict[str, float] = {}
    texts: list[str] = []
    for key, value in detail.items():
        if isinstance(value, str):
            texts.append(f"{key}: {value}")
        elif isinstance(value, int | float) and math.isfinite(value):
            figures[key] = float(value)
    return figures, "; ".join(texts)[:_MESSAGE_CHARACTERS]
