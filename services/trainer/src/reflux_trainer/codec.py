"""Text and token ids of a model folder's tokenizer, without torch."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class Codec:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError naming the file."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"model folder {folder} has no {name}")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        end = config.get("eos_token")
        word = end.get("content") if isinstance(end, dict) else end
        self.end_id: int | None = self._tokenizer.token_to_id(word) if word else None
        """Id that ends an answer; None when the tokenizer has none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, end-of-sequence included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
