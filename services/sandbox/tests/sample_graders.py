"""Verifiers for the tests, loaded by the warm parent like the real ones: obedient, slow, hanging, crashing, greedy."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from reflux_sandbox.isolation import frames
from reflux_tasks import progress


def _scored(reward: float, **figures: float) -> dict[str, Any]:
    return {"outcome": "scored", "reward": reward, "figures": figures, "message": ""}


def _length(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    return [_scored(float(len(answer)), pid=float(os.getpid())) for answer in answers]


def _hang(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    if "hang" in answers:
        sum(range(10**12))  # one call into C: the interpreter never comes back to look at a signal
    return _length(payload, answers)


def _slow(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    time.sleep(float(answers[0]))
    return _length(payload, answers)


def _telling(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    """Tells how far it has come until somebody stops it."""
    while True:
        progress.report(float(answers[0]))
        time.sleep(0.05)


def _flood(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    """A verifier that was taken over: it writes to the channel of its own."""
    tell = progress.listener.__closure__
    inside = dict(zip(progress.listener.__code__.co_freevars, (cell.cell_contents for cell in tell or ()), strict=True))
    while True:
        frames.send(inside["channel"], {"nonce": inside["nonce"], "progress": 0.5})


def _crash(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    if answers[0] == "segfault":
        os.abort()
    raise RuntimeError("a bug of the verifier")


def _memory(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    blocks = [bytearray(64 << 20) for _ in range(1000)]
    return _length(payload, [*answers, str(len(blocks))])


def _native(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    command = ["/usr/bin/python3", "-I", "-c", "import sys; print(len(sys.argv[1]))"]
    rows = []
    for answer in answers:
        done = subprocess.run([*command, answer], capture_output=True, text=True, check=True)
        rows.append(_scored(float(done.stdout)))
    return rows


def _plain_exec(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    return _native(payload, answers)


def _malformed(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    return [{"outcome": "scored", "reward": "much", "figures": {}, "message": ""} for _ in answers]


def _hostile(payload: str, answers: list[str]) -> list[dict[str, Any]]:
    exec(answers[0], {})
    return _length(payload, answers)


_VERIFIERS = {
    "test/length": (_length, "rule", True),
    "test/apart": (_length, "rule", False),
    "test/hang": (_hang, "rule", True),
    "test/slow": (_slow, "surrogate", False),
    "test/telling": (_telling, "rule", False),
    "test/flood": (_flood, "rule", False),
    "test/crash": (_crash, "rule", True),
    "test/memory": (_memory, "rule", False),
    "test/native": (_native, "full", True),
    "test/exec": (_plain_exec, "rule", True),
    "test/hostile": (_hostile, "rule", False),
    "test/malformed": (_malformed, "rule", True),
}


def family_names() -> list[str]:
    return ["test"]


class LoadedVerifiers:
    """The interface of reflux_sandbox.isolation.graders.LoadedVerifiers."""

    def __init__(self, cache_folder: Path, family: str) -> None:
        self.problems: list[str] = []

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "version": "1",
                "fidelity": fidelity,
                "trusted": trusted,
                "cost_seconds": 0.001,
                "weakest_tier": "process" if name in ("test/length", "test/native") else "prefork",
            }
            for name, (_, fidelity, trusted) in _VERIFIERS.items()
        ]

    def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        return {"grades": _VERIFIERS[verifier][0](payload, answers)}
