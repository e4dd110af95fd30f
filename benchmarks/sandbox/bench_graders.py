"""Trivial verifiers for the measurements, loaded by warm parents like the real ones."""

import time
from pathlib import Path
from typing import Any


def family_names() -> list[str]:
    """One warm parent."""
    return ["bench"]


def _row(name: str, fidelity: str, *, trusted: bool) -> dict[str, Any]:
    return {
        "name": f"bench/{name}",
        "version": "1",
        "fidelity": fidelity,
        "trusted": trusted,
        "cost_seconds": 0.001,
        "weakest_tier": "prefork",
    }


class LoadedVerifiers:
    """trivial: the length of an answer. apart: the same in a child per job. held: a job that does not end."""

    def __init__(self, cache_folder: Path, family: str) -> None:
        self.problems: list[str] = []

    def rows(self) -> list[dict[str, Any]]:
        """What the service must know of them."""
        return [
            _row("trivial", "rule", trusted=True),
            _row("apart", "rule", trusted=False),
            _row("held", "full", trusted=False),
        ]

    def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """Grades answers."""
        if verifier == "bench/held":
            time.sleep(3600)
        rows = [{"outcome": "scored", "reward": float(len(text)), "figures": {}, "message": ""} for text in answers]
        return {"grades": rows}
