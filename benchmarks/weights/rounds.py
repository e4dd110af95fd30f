"""Interleaved rounds over ways that run in processes of their own: one works, all others are stopped."""

import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MODEL_BYTES = 269_030_016
"""SmolLM2-135M in bfloat16."""

_WAYS = Path(__file__).parent / "ways"
_ANSWER_SECONDS = 120


@dataclass(frozen=True)
class Setup:
    """A module of `ways/`, the Python that it runs in, what is set for it, and its arguments after the length."""

    module: str
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


class Way:
    """A process of `ways/`; raises `RuntimeError` when it does not come up or ends."""

    def __init__(self, setup: Setup, length: int, errors: IO[str]) -> None:
        self._module = setup.module
        self._errors = errors
        self._process = subprocess.Popen(
            [str(setup.python), str(_WAYS / f"{setup.module}.py"), str(length), *setup.arguments],
            env={**os.environ, **setup.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        while self._answer() != "ready":  # libraries print what they like before
            pass
        self._signal(signal.SIGSTOP)

    def ask(self, what: str) -> str:
        """Lets it work for one answer; pollers and threads of the others stand still meanwhile."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def seconds(self) -> float:
        """One transfer."""
        return float(self.ask("go"))

    def close(self) -> None:
        """Ends the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise RuntimeError(f"{self._module}: no answer within {_ANSWER_SECONDS} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self._module}: {(self._errors.read().strip() or 'ended').splitlines()[-1]}")
        return line.strip()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


@contextmanager
def ways(setups: Mapping[str, Setup], length: int) -> Iterator[dict[str, Way]]:
    """Those of the setups that work here, by name; why the others do not is printed."""
    with ExitStack() as stack:
        found = {}
        for name, setup in setups.items():
            if not setup.python.exists():
                print(f"{name}: left out, {setup.python} does not exist (deploy/bench/peers.sh makes it)", flush=True)
                continue
            try:
                found[name] = way = Way(setup, length, stack.enter_context(tempfile.TemporaryFile("w+")))
            except RuntimeError as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            stack.callback(way.close)
        yield found


def interleaved(found: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` transfers of every way in turn after one that does not count; then compares all bytes."""
    measured: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, way in found.items():
            seconds = way.seconds()
            if number:
                measured[name].append(seconds)
    for name, way in found.items():
        if (answer := way.ask("check")) != "whole":
            raise RuntimeError(f"{name}: {answer} arrived")
    return measured


def spread(seconds: Sequence[float], length: int) -> str:
    """Median, smallest and largest time, and the rate of the median."""
    middle = statistics.median(seconds)
    extremes = f"[{min(seconds) * 1e3:.1f} {max(seconds) * 1e3:.1f}]"
    return f"{middle * 1e3:8.1f} ms {extremes}, {length / middle / 1e9:6.2f} GB/s, {len(seconds)} rounds"
