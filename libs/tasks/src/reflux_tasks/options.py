"""Parses a task's options from a run file into its frozen dataclass, naming what is wrong and what would work."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InvalidOption(ValueError):
    """An option of a task is unknown, of the wrong type or out of range: key, value and a value that would work."""

    def __init__(self, key: str, value: object, way_out: str) -> None:
        super().__init__(f"{key} = {value!r} is not valid: {way_out}")
        self.key = key
        self.value = value
        self.way_out = way_out


def parse_options(kind: type[T], options: Mapping[str, Any]) -> T:
    """Makes a `kind` (a dataclass of bool, int, float, str and Literal fields with defaults); raises InvalidOption."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {close[0]}?" if close else f"known options are {', '.join(fields)}"
            raise InvalidOption(key, value, f"there is no such option; {hint}")
        values[key] = _convert(key, value, types[key], fields[key].default)
    return kind(**values)


def _convert(key: str, value: Any, kind: Any, default: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InvalidOption(key, value, f"use one of {', '.join(map(repr, get_args(kind)))}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # exact: a bool is no int here
        raise InvalidOption(key, value, f"needs a value of type {kind.__name__}, for example {default!r}")
    return value
