"""A task that costs nothing to build: repeat the number of the prompt. Registered by `counting_task.register`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from reflux_tasks.options import parse_options
from reflux_tasks.task import Problem, Split, Task
from reflux_tasks.verify import Grade, Verifier


@dataclass(frozen=True, kw_only=True)
class CountingOptions:
    num_phases: int = 8
    peaks_hidden: bool = False


class RepeatVerifier(Verifier):
    name: ClassVar[str] = "label"
    version: ClassVar[str] = "1"
    fidelity: ClassVar[str] = "rule"
    trusted: ClassVar[bool] = True
    cost_seconds: ClassVar[float] = 0.0

    def grade(self, payload, answers):
        return [Grade("scored", float(answer.split()[:1] == [payload["number"]])) for answer in answers]


class SurrogateVerifier(RepeatVerifier):
    name: ClassVar[str] = "surrogate"
    fidelity: ClassVar[str] = "surrogate"


class FullVerifier(RepeatVerifier):
    name: ClassVar[str] = "full"
    fidelity: ClassVar[str] = "full"


class CountingTask(Task[Problem]):
    name: ClassVar[str] = "counting"
    max_answer_words: ClassVar[int] = 2

    def __init__(self, seed: int, options: CountingOptions) -> None:
        self.seed, self.options = seed, options

    @classmethod
    def create(cls, seed: int, cache_dir: Any, options: Mapping[str, Any]) -> Self:
        return cls(seed, parse_options(CountingOptions, options))

    @property
    def words(self) -> Sequence[str]:
        return ["<pad>", "<eos>", "<ask>", *(f"n{number}" for number in range(self.options.num_phases))]

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(split, index)

    def stratum(self, problem: Problem) -> str:
        return "odd" if problem.index % 2 else "even"

    def _number(self, problem: Problem) -> str:
        return f"n{problem.index % self.options.num_phases}"

    def prompt_words(self, problem: Problem) -> list[str]:
        return [self._number(problem), "<ask>"]

    def answer_words(self, problem: Problem) -> list[str]:
        return [self._number(problem), "<eos>"]

    def truth(self, problem: Problem) -> dict[str, Any]:
        return {"number": self._number(problem)}

    @property
    def verifiers(self) -> Mapping[str, Verifier]:
        return {"label": RepeatVerifier(), "surrogate": SurrogateVerifier(), "full": FullVerifier()}

    def split_record(self) -> dict[str, Any]:
        return {"seed": self.seed, "numbers": self.options.num_phases}


class _EntryPoint:
    name, value = "counting", "counting_task:CountingTask"

    def load(self) -> type[CountingTask]:
        return CountingTask


def register(monkeypatch: Any) -> None:
    """Makes it the only installed task."""
    monkeypatch.setattr("reflux_tasks.registry.entry_points", lambda group: [_EntryPoint()])
