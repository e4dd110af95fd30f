"""Reads run files: TOML text or a parsed document becomes a `RunConfig`, or a `ConfigError`."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal


def load_file(path: Path) -> RunConfig:
    """Reads a TOML run file. Raises ConfigError; an unreadable file is one too, with the path as its key."""
    return load_document(load_toml(path))


def load_toml(path: Path) -> dict[str, Any]:
    """The document of a TOML file, unchecked. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            (Refusal("file", str(path), f"cannot be read ({reason})", "the path of a TOML file"),)
        ) from None
    return _parse(text)


def load_text(text: str) -> RunConfig:
    """Reads a run file's text. Raises ConfigError."""
    return load_document(_parse(text))


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError((Refusal("file", "", f"is not TOML ({error})", 'lines such as "rl.steps = 150"'),)) from None


def load_document(document: Mapping[str, Any]) -> RunConfig:
    """Makes a configuration of nested mappings; absent keys take their defaults. Raises ConfigError."""
    try:
        return RunConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(tuple(_refusal(detail) for detail in error.errors())) from None


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """`config` with the keys of `changes`, nested as in a run file, in place of its own. Raises ConfigError."""
    return load_document(merged(config.model_dump(exclude_none=True), changes))


def merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's document with the keys of `changes` in place of its own, section by section."""
    found = dict(document)
    for name, value in changes.items():
        own = found.get(name)
        found[name] = {**own, **value} if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return found


def dump_text(config: RunConfig) -> str:
    """The configuration as TOML with every field, defaults filled in; `load_text` reads it back."""
    document = config.model_dump(exclude_none=True)
    top = [f"{key} = {json.dumps(value)}" for key, value in document.items() if not isinstance(value, dict)]
    sections = [
        f"\n[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items())
        for name, section in document.items()
        if isinstance(section, dict)
    ]
    return "\n".join(top + sections) + "\n"


def section_of(path: tuple[str, ...]) -> type[BaseModel]:
    """Class of the section that holds the last key of `path`."""
    model: type[BaseModel] = RunConfig
    for name in path[:-1]:
        annotation = model.model_fields[name].annotation
        assert isinstance(annotation, type)
        model = annotation
    return model


def default_of(key: str) -> object:
    """Default of a dotted key."""
    path = tuple(key.split("."))
    return section_of(path).model_fields[path[-1]].default


def _refusal(detail: ErrorDetails) -> Refusal:
    path = tuple(str(part) for part in detail["loc"])
    key, value = ".".join(path), detail["input"]
    if detail["type"] == "extra_forbidden":
        known = list(section_of(path).model_fields)
        close = difflib.get_close_matches(path[-1], known, 1)
        works = f"{'.'.join((*path[:-1], close[0]))}" if close else f"one of {', '.join(known)}"
        return Refusal(key, value, "there is no such key", works)
    if detail["type"] == "model_type":
        return Refusal(key, value, "is a section, not a value", f"[{key}] with keys below it")
    return Refusal(key, value, detail["msg"][:1].lower() + detail["msg"][1:], _example(path))


def _example(path: tuple[str, ...]) -> str:
    known = section_of(path).model_fields
    if path[-1] not in known:
        return "a value of another type"
    field = known[path[-1]]
    if field.default is not None:
        return json.dumps(field.default)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    return "0.3" if any("float" in str(kind) for kind in kinds) else "leaving it out, or 8"
