"""The contract of a task: deterministic problems over a closed vocabulary, and the verifiers that grade answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

import numpy as np

from reflux_tasks.tokenizer import write_word_tokenizer
from reflux_tasks.verify import Verifier

Split = Literal["warmup", "train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Problem:
    """One problem; tasks derive their own from it."""

    split: Split
    index: int


P = TypeVar("P", bound=Problem)


class Task(ABC, Generic[P]):
    """Problems, words and verifiers of one domain. Pure: equal seeds and options give equal problems everywhere.

    `problem(split, index)` is a function of (seed, options, split, index) alone, for any index >= 0, so that workers
    make problems by themselves and a restart repeats them. `truth` holds JSON types only; a verifier gets nothing else.
    """

    name: ClassVar[str]
    pad_word: ClassVar[str] = "<pad>"
    end_word: ClassVar[str] = "<eos>"
    max_answer_words: ClassVar[int]
    """Longest answer that can be right, end word included."""

    @classmethod
    @abstractmethod
    def create(cls, seed: int, cache_dir: Path, options: Mapping[str, Any]) -> Self:
        """Builds the task of a run; raises InvalidOption for options that it does not know or cannot use."""

    @property
    @abstractmethod
    def words(self) -> Sequence[str]:
        """The vocabulary; the position of a word is its token id."""

    @abstractmethod
    def problem(self, split: Split, index: int) -> P: ...

    @abstractmethod
    def prompt_words(self, problem: P) -> list[str]: ...

    @abstractmethod
    def answer_words(self, problem: P) -> list[str]:
        """The right answer with its end word, for supervised warm-up."""

    @abstractmethod
    def truth(self, problem: P) -> dict[str, Any]: ...

    @property
    @abstractmethod
    def verifiers(self) -> Mapping[str, Verifier]: ...

    @abstractmethod
    def split_record(self) -> dict[str, Any]:
        """What separates training from evaluation (seeds, held-out parts), as JSON for the run folder."""

    def write_tokenizer(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json (Hugging Face) of `words` into an existing folder."""
        write_word_tokenizer(self.words, self.pad_word, self.end_word, folder)

    def initial_embedding(self, hidden_size: int, seed: int) -> tuple[int, np.ndarray] | None:
        """First token id and rows [count, hidden_size] of embeddings that start from structure, or None."""
        del hidden_size, seed
        return None

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token id of each word."""
        return {word: token_id for token_id, word in enumerate(self.words)}

    def prompt_ids(self, problem: P) -> list[int]:
        return [self.ids[word] for word in self.prompt_words(problem)]

    def answer_ids(self, problem: P) -> list[int]:
        return [self.ids[word] for word in self.answer_words(problem)]

    def prompt_text(self, problem: P) -> str:
        return " ".join(self.prompt_words(problem))

    def stratum(self, problem: P) -> str:
        """Kind of problem whose pass rate a curriculum follows: one of a few dozen at most. Here all are alike."""
        del problem
        return "all"

    def prose(self, problem: P) -> str:
        """The problem in sentences, for a language model; a task without them gives its words."""
        return self.prompt_text(problem)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; raises ValueError for an id outside the vocabulary."""
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < len(self.words)]
        if unknown:
            raise ValueError(f"token ids {unknown[:5]} are outside the vocabulary of {len(self.words)} words")
        return " ".join(self.words[token_id] for token_id in token_ids)
