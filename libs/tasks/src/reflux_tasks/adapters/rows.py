"""Tasks over the rows of a data set: prompts and answers are text, and the rows' own words are the vocabulary."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from reflux_tasks.options import InvalidOption, parse_options
from reflux_tasks.task import SPLITS, Problem, Split, Task

MOST_ROWS = 1_000_000
END_MARKS = ("<eos>", "<pad>", "</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")
"""Words that models end an answer with; they are not part of what an environment grades."""


@dataclass(frozen=True)
class Row:
    """One row."""

    prompt: str
    answer: str
    """A right answer, for the supervised warm-up; empty when the data set has none."""
    truth: dict[str, Any]
    """JSON types only: all that the verifier gets."""


@dataclass(frozen=True, kw_only=True)
class RowsOptions:
    """Options of every task over rows."""

    num_rows: int = 10_000
    """Rows that are read at most."""
    heldout_every: int = 10
    """Row 0, k, 2k, ... are held out."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_rows <= MOST_ROWS:
            raise InvalidOption("num_rows", self.num_rows, f"use 2 to {MOST_ROWS}")
        if self.heldout_every < 2:
            raise InvalidOption("heldout_every", self.heldout_every, "use 2 or more; 10 holds out a tenth")


@dataclass(frozen=True)
class RowProblem(Problem):
    """One row of a split."""

    row: int


class RowsTask(Task[RowProblem]):
    """Subclasses say where rows come from and how answers are graded.

    A split goes through its rows in a new order each time (by seed and pass), held-out rows in their own order. A fresh
    model learns the words of the rows; one with a tokenizer of its own (`[model] path`) takes any text. A prompt is the
    text of the row's messages: no chat template is applied.
    """

    max_answer_words: ClassVar[int] = 4096

    def __init__(self, seed: int, options: RowsOptions) -> None:
        self.seed = seed
        self.options = options

    @classmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        del cache_dir
        return cls(seed, parse_options(RowsOptions, options))

    @abstractmethod
    def read_rows(self, most: int) -> Sequence[Row]:
        """The first `most` rows, always the same."""

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Raises InvalidOption when a split would be empty."""
        rows = self.read_rows(self.options.num_rows)
        if len(rows) < 2:
            raise InvalidOption("num_rows", len(rows), "the data set needs at least 2 rows")
        return rows

    @cached_property
    def words(self) -> Sequence[str]:
        texts = [text for row in self.rows for text in (row.prompt, row.answer)]
        found = {word for text in texts for word in text.split()}
        return (self.pad_word, self.end_word, *sorted(found - {self.pad_word, self.end_word}))

    def problem(self, split: Split, index: int) -> RowProblem:
        if split not in SPLITS or index < 0:
            raise ValueError(f"no problem {split}/{index}: splits are {', '.join(SPLITS)}, indices start at 0")
        every = self.options.heldout_every
        held = (len(self.rows) + every - 1) // every
        if split == "heldout":
            return RowProblem(split, index, index % held * every)
        passes, place = divmod(index, len(self.rows) - held)
        chosen = int(self._order(SPLITS.index(split), passes)[place])
        return RowProblem(split, index, chosen + chosen // (every - 1) + 1)  # rows between the held-out ones

    def _order(self, stream: int, passes: int) -> np.ndarray:
        key = (stream, passes)
        if key not in self._orders:
            self._orders.clear()  # an index goes up: one pass is in use at a time
            every = self.options.heldout_every
            count = len(self.rows) - (len(self.rows) + every - 1) // every
            self._orders[key] = np.random.default_rng((self.seed, stream, passes)).permutation(count)
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def prompt_words(self, problem: RowProblem) -> list[str]:
        return self.rows[problem.row].prompt.split()

    def prompt_text(self, problem: RowProblem) -> str:
        return self.rows[problem.row].prompt

    def answer_words(self, problem: RowProblem) -> list[str]:
        return [*self.rows[problem.row].answer.split(), self.end_word]

    def truth(self, problem: RowProblem) -> dict[str, Any]:
        return self.rows[problem.row].truth

    def split_record(self) -> dict[str, Any]:
        options = self.options
        return {"task": self.name, "seed": self.seed, "num_rows": options.num_rows, "every": options.heldout_every}


def spoken(answer: str) -> str:
    """An answer without the marks that end it."""
    text = answer.rstrip()
    while (mark := next((mark for mark in END_MARKS if text.endswith(mark)), None)) is not None:
        text = text.removesuffix(mark).rstrip()
    return text
