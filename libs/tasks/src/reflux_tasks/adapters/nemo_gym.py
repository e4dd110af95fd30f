"""Environments behind the `/verify` contract of NeMo Gym's resources servers as tasks: rows of a JSONL file, unchanged.

    MyGym = gym_task("my-gym", Path(__file__).with_name("train.jsonl"))

The server is called by the sandbox service, because children have no network: name it in the service's settings,
`remote.http."my-gym/verify"` with `url` and `version` (docs/write-a-task.md). A row holds `responses_create_params`,
whose `input` is the prompt, and whatever the server wants besides; the whole row is sent.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from reflux_tasks.adapters.rows import Row, RowsTask
from reflux_tasks.canonical import Form
from reflux_tasks.verify import Answer, Fidelity, Grade, Verifier, VerifierUnavailable

ANSWER_FIELDS = ("answer", "expected_answer")
"""Fields of a row that hold a right answer, for the supervised warm-up."""


def gym_task(name: str, dataset: Path) -> type[RowsTask]:
    """A task class over the rows of `dataset`, a JSONL file."""

    class Bound(GymTask):
        pass

    Bound.name = name
    Bound.dataset = dataset
    Bound.__name__ = Bound.__qualname__ = f"GymTask[{name}]"
    return Bound


class GymTask(RowsTask):
    """See `gym_task`."""

    dataset: ClassVar[Path]

    def read_rows(self, most: int) -> Sequence[Row]:
        with self.dataset.open(encoding="utf-8") as lines:
            return [_row(line, f"{self.dataset}:{number}") for number, line in enumerate(islice(lines, most), 1)]

    @cached_property
    def verifiers(self) -> Mapping[str, Verifier]:
        return {ServedVerifier.name: ServedVerifier(self.name)}


class ServedVerifier(Verifier):
    """Stands for the server in the task's list of verifiers; the service sends its jobs to the server itself."""

    name: ClassVar[str] = "verify"
    version: ClassVar[str] = "unset"
    fidelity: ClassVar[Fidelity] = "rule"
    trusted: ClassVar[bool] = True
    cost_seconds: ClassVar[float] = 1.0
    canonical_form: ClassVar[Form] = "exact"

    def __init__(self, task: str) -> None:
        self._task = task

    def prepare(self) -> None:
        """Nothing is needed here: the server grades."""

    def grade(self, payload: Mapping[str, Any], answers: Sequence[Answer]) -> list[Grade]:
        raise VerifierUnavailable(
            f"{self._task}/{self.name} is graded by a server: set remote.http of the sandbox service "
            f'(REFLUX_SANDBOX_REMOTE={{"http": {{"{self._task}/{self.name}": {{"url": ..., "version": ...}}}}}})'
        )


def _row(line: str, place: str) -> Row:
    """Raises ValueError with file and line."""
    try:
        row = json.loads(line)
        prompt = _text(row["responses_create_params"]["input"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: not a row with responses_create_params.input: {error!r}") from error
    answer = next((str(row[field]) for field in ANSWER_FIELDS if row.get(field) is not None), "")
    return Row(prompt, answer, row)


def _text(given: str | list[dict[str, Any]]) -> str:
    """Text of an input of the Responses API: a string, or messages whose content is a string or text parts."""
    if isinstance(given, str):
        return given
    parts: list[str] = []
    for message in given:
        content = message.get("content") or ""
        parts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return "\n\n".join(part for part in parts if part)
