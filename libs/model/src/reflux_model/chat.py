"""The chat template of a model folder: conversations as the text that the model was tuned on. Free of torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
"""Where newer folders keep the template; older ones have it in tokenizer_config.json."""


def template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template of a folder whose tokenizer_config.json was read, None when it has none."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    return source if isinstance(source, str) else None


class ChatTemplate:
    """A compiled template, run in Jinja's sandbox: folders come from anywhere."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names that the template knows, such as `bos_token`. ValueError: does not parse."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template does not parse: {error}") from error

    @classmethod
    def of_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The folder's template, None when it has none. ValueError when tokenizer_config.json or it cannot be read."""
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        source = template_source(folder, config)
        return None if source is None else cls(source, special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of a conversation up to where the answer begins; ValueError when the template refuses it."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """First and last token of a text, as templates name them; empty where the tokenizer has none."""
    return {name: special_token(tokenizer_config, name) for name in ("bos_token", "eos_token")}


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str:
    """Text of a special token, which is written as a string or as an object; empty where there is none."""
    value = tokenizer_config.get(name)
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _refuse(message: str) -> None:
    raise TemplateError(message)
