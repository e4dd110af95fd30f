"""What a verifier is: a pure function from a problem's truth and some answers to grades."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reflux_tasks.canonical import Form, text_form

Fidelity = Literal["rule", "surrogate", "full"]
Outcome = Literal["scored", "invalid"]
TierName = Literal["process", "prefork", "bwrap", "gvisor"]
"""Isolation tiers of the sandbox, weakest first (docs/sandbox-isolation.md)."""
Answer = str | Sequence[str]


class VerifierUnavailable(RuntimeError):
    """The machine lacks something that a verifier needs; the message says what and how to get it."""


class VerificationError(RuntimeError):
    """A verifier could not reach a verdict (a crash or a limit of its tool): the reward is unknown, never 0."""


@dataclass(frozen=True)
class Grade:
    """Verdict on one answer. `reward` is finite; an `invalid` answer (not parsable) has reward 0."""

    outcome: Outcome
    reward: float
    detail: Mapping[str, Any] = field(default_factory=dict)


class Verifier(ABC):
    """Grades answers to one problem; equal inputs give equal grades on every machine.

    The grade of an answer does not depend on its neighbours, because equal answers of a group, or of two runs, are
    graded once: those with equal verifier, version, payload and canonical text (docs/adr/0016-canonical-answers.md).

    `grade` takes the payload of `Task.truth` (JSON types only) and the answers of a whole group, as text (words
    separated by white space, end word included) or as lists of words. It returns one Grade per answer in the same
    order. It raises ValueError for a payload that its task did not make, VerifierUnavailable when the machine lacks a
    tool, and VerificationError when a tool failed; no answer of a model ever makes it raise anything else.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """Part of the key of the result cache: changes whenever a grade could."""
    fidelity: ClassVar[Fidelity]
    trusted: ClassVar[bool]
    """True when an answer is only data to it, so that one child may grade a whole group."""
    cost_seconds: ClassVar[float]
    """Typical CPU seconds per answer on one core, for scheduling and deadlines."""
    weakest_tier: ClassVar[TierName] = "prefork"
    """Isolation below which the sandbox does not offer it. `process` (limits only) is for verifiers to which any answer
    is plain data, without a parser in native code; `gvisor` for those that run what an answer says."""
    canonical_form: ClassVar[Form] = "words"
    """Which answers have equal grades, see `canonical.Form`; "exact" where white space matters, such as in code."""

    def prepare(self) -> None:  # noqa: B027 a verifier without tools has nothing to prepare
        """Loads what grading needs, so that forked children start warm and need no folder to write to.

        Raises VerifierUnavailable when the machine lacks a tool. Optional: `grade` loads what is missing.
        """

    def canonical(self, payload: Mapping[str, Any], answer: str) -> str | None:
        """The text that stands for all answers with the grade of this one. Never raises.

        Overridden together with `canonical_form = "own"` where that takes more than words; it then runs in a child like
        `grade`. None for an answer that does not parse: it stands for itself, and no text of a model can pass for the
        canonical text of another answer.
        """
        del payload
        return None if self.canonical_form == "own" else text_form(self.canonical_form, answer)

    @abstractmethod
    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]: ...


def answer_words(answer: Answer) -> list[str]:
    """The words of an answer given as text or as words."""
    return answer.split() if isinstance(answer, str) else [str(word) for word in answer]
