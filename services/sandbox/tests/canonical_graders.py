"""A verifier with a canonical form of its own, for the tests of keys: letters in any order are equal."""

import time
from pathlib import Path
from typing import Any


def family_names() -> list[str]:
    return ["test"]


class LoadedVerifiers:
    """The interface of reflux_sandbox.isolation.graders.LoadedVerifiers."""

    def __init__(self, cache_folder: Path, family: str = "") -> None:
        self.problems: list[str] = []

    def rows(self) -> list[dict[str, Any]]:
        row = {"name": "test/own", "version": "1", "fidelity": "rule", "trusted": True, "cost_seconds": 0.001}
        return [row | {"canonical_form": "own", "weakest_tier": "process"}]

    def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        if not verifier.endswith("#canonical"):
            return {"grades": [{"outcome": "scored", "reward": 1.0, "figures": {}, "message": ""} for _ in answers]}
        if "crash" in answers:
            raise RuntimeError("a bug of the verifier")
        if "hang" in answers:
            time.sleep(60)
        if "half" in answers:
            return {"canonical": ["\ud800"] * len(answers)}
        return {"canonical": ["".join(sorted(text)) if text.isalpha() else None for text in answers]}
