"""Environments of the `verifiers` library (Prime Intellect) as tasks: rows become problems, rewards become grades.

A lab's distribution has one line of code and one entry point of the group `reflux.tasks`, my-math = "my_math:MyMath":

    MyMath = verifiers_task("my-math", "installed_environment")

Single-turn environments whose rewards need neither a model, a network nor a container of their own: everything runs in
a child of the sandbox. Others keep their own server and are called through `/verify` (adapters.nemo_gym). The
library needs an environment of its own where its pins (openai, mcp) are not the ones in use.
"""

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from reflux_tasks.adapters.rows import Row, RowsTask, spoken
from reflux_tasks.adapters.verifiers_loading import ForeignEnvironment, open_environment
from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, VerificationError, Verifier, VerifierUnavailable


def verifiers_task(name: str, environment: str, arguments: Mapping[str, Any] | None = None) -> type[RowsTask]:
    """A task class for the installed environment (its package, "owner/name" of the hub is fine).

    `arguments` go to `load_environment` (library below 0.4) or into the taskset's config (0.4 and later).
    """
    given = dict(arguments or {})

    class Bound(VerifiersTask):
        pass

    Bound.name = name
    Bound.environment = environment
    Bound.arguments = given
    Bound.__name__ = Bound.__qualname__ = f"VerifiersTask[{environment}]"
    return Bound


class VerifiersTask(RowsTask):
    """See `verifiers_task`."""

    environment: ClassVar[str]
    arguments: ClassVar[Mapping[str, Any]]

    @cached_property
    def _foreign(self) -> ForeignEnvironment:
        return open_environment(self.environment, self.arguments)

    def read_rows(self, most: int) -> Sequence[Row]:
        return self._foreign.rows(most)

    @cached_property
    def verifiers(self) -> Mapping[str, Verifier]:
        return {RewardVerifier.name: RewardVerifier(self.environment, self.arguments)}


class RewardVerifier(Verifier):
    """Reward = the environment's weighted sum; its single rewards and metrics are figures.

    A reward function that raises is a VerificationError: the library itself would count it as 0.
    """

    name: ClassVar[str] = "reward"
    fidelity: ClassVar[Fidelity] = "rule"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 0.05
    canonical_form: ClassVar[Form] = "exact"

    def __init__(self, environment: str, arguments: Mapping[str, Any]) -> None:
        self._environment = environment
        self._arguments = arguments

    @property
    def version(self) -> str:  # type: ignore[override]
        """Versions of environment and library."""
        package = self._environment.rpartition("/")[2].partition("@")[0]
        return "+".join(f"{name}-{_version(name)}" for name in (package, "verifiers"))

    def prepare(self) -> None:
        _ = self._foreign

    @cached_property
    def _foreign(self) -> ForeignEnvironment:
        try:
            return open_environment(self._environment, self._arguments)
        except ImportError as error:
            raise VerifierUnavailable(f"environment {self._environment!r} does not import here: {error}") from error

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        return [self._grade(payload, answer if isinstance(answer, str) else " ".join(answer)) for answer in answers]

    def _grade(self, payload: Mapping[str, Any], answer: str) -> Grade:
        reward, figures = self._foreign.score(payload, spoken(answer))
        if not math.isfinite(reward):
            raise VerificationError(f"the environment's reward is {reward}")
        return Grade("scored", reward, figures)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "0"
