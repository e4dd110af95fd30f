"""Text to token ids and back, from a model folder's tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from reflux_model.chat import ChatTemplate, special_token, special_tokens, template_source


class TextTokenizer:
    """Owns the model folder's tokenizer and chat template. Safe to call from any thread."""

    def __init__(self, folder: Path) -> None:
        """Reads both files; raises OSError or ValueError when one is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        self._config = _read_json(folder / "tokenizer_config.json")
        source = template_source(folder, self._config)
        self._template = None if source is None else ChatTemplate(source, special_tokens(self._config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer adds by itself (for example a beginning-of-text token).

        Raises ValueError for a text that the vocabulary cannot express (a word-level tokenizer without unknown word).
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the Rust library raises bare Exception
            raise ValueError(f"this model's tokenizer cannot encode the text: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def piece(self, token_id: int) -> str:
        """Text of one token as log-prob listings show it; special tokens included."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text or self._tokenizer.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text."""
        return self._tokenizer.token_to_id(token)

    def eos_ids(self) -> set[int]:
        """End-of-sequence ids that tokenizer_config.json names."""
        found = self.token_id(special_token(self._config, "eos_token"))
        return set() if found is None else {found}

    def chat_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation; raises ValueError when the template refuses it."""
        if self._template is None:
            lines = [f"{message['role']}: {message['content']}" for message in messages]
            return self.encode("\n".join([*lines, "assistant:"]))
        return self.encode(self._template.render(messages), add_special_tokens=False)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object")
    return value
