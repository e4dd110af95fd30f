"""Questions and answers as token ids of a model folder's tokenizer, without torch.

A fresh model reads and writes the task's own words, whose end word is a token. A language model gets sentences and ends
an answer with its own end-of-sequence token: verifiers see the task's end word in that place.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from reflux_model.chat import ChatTemplate, special_token
from reflux_runs.config import Prompt, RunConfig
from reflux_tasks.registry import task_class
from reflux_trainer.problems import Question

_ANSWER = "\nAnswer:"
"""Where the answer to sentences outside a chat begins."""


class Codec:
    """The tokenizer of one model folder, and how questions are put to the model."""

    def __init__(self, folder: Path, prompt: Prompt = "words", end_word: str = "<eos>") -> None:
        """Raises FileNotFoundError naming the file, or ValueError when one is broken or lacks what `prompt` needs."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"model folder {folder} has no {name}")
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from error
        word = special_token(json.loads((folder / "tokenizer_config.json").read_text()), "eos_token")
        self.end_id: int | None = self._tokenizer.token_to_id(word) if word else None
        """Id that ends an answer; None when the tokenizer has none."""
        self._folder, self._prompt, self._end_word = folder, prompt, end_word
        self._template = ChatTemplate.of_folder(folder) if prompt == "chat" else None
        if prompt == "chat" and self._template is None:
            raise ValueError(f'model folder {folder} has no chat template: task.prompt = "text" does without')
        if prompt != "words" and self.end_id is None:
            raise ValueError(f"{folder / 'tokenizer_config.json'} names no eos_token, which ends an answer")

    @classmethod
    def of_run(cls, config: RunConfig, folder: Path) -> "Codec":
        """As a run's configuration says. Errors as above."""
        return cls(folder, config.task.prompt, task_class(config.task.name).end_word)

    def prompt_text(self, question: Question) -> str:
        """What the model reads."""
        if self._prompt == "words":
            return question.prompt_text
        if self._template is None:
            return question.prose + _ANSWER
        return self._template.render([{"role": "user", "content": question.prose}])

    def prompt_ids(self, question: Question) -> list[int]:
        """Token ids of what the model reads. Raises ValueError when the tokenizer lacks its words."""
        return self._encode(self.prompt_text(question))

    def answer_ids(self, question: Question) -> list[int]:
        """Token ids of the right answer, its end included."""
        if self._prompt == "words":
            return self._encode(question.answer_text)
        assert self.end_id is not None
        answer = question.answer_text.removesuffix(self._end_word).strip()
        return [*self._encode(answer if self._template else f" {answer}"), self.end_id]

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """An answer as verifiers read it, in the task's words with its end word if it has ended."""
        if self._prompt == "words" or not token_ids or token_ids[-1] != self.end_id:
            return self._decode(token_ids)
        return f"{self._decode(token_ids[:-1])} {self._end_word}"

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the Rust library raises bare Exception
            raise ValueError(f"the tokenizer of {self._folder} cannot encode {text[:60]!r}: {error}") from error

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
