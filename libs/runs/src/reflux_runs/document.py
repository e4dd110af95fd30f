"""Writes docs/run-file.md from the docstrings of the fields: `python -m reflux_runs.document > docs/run-file.md`."""

import json
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reflux_runs.config import RunConfig

_HEAD = """# The run file

A run file is TOML; `reflux run FILE` checks it and starts a run. Every key is optional, an unknown one is refused.
Written by `python -m reflux_runs.document` from the docstrings of `libs/runs/src/reflux_runs/config.py`; a test keeps
it fresh.
"""


def document() -> str:
    """The page as Markdown."""
    fields = RunConfig.model_fields
    top = {name: field for name, field in fields.items() if not _is_section(field)}
    parts = [_HEAD, "## Top level", _table(top)]
    for name, field in fields.items():
        if _is_section(field):
            section = field.annotation
            assert isinstance(section, type)
            assert issubclass(section, BaseModel)
            parts += [f"## [{name}]", (section.__doc__ or "") + "\n", _table(section.model_fields)]
    return "\n".join(parts)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        meaning = " ".join((field.description or "").split())
        default = "unset" if field.default is None else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {_kind(field)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{word} {getattr(limit, name):g}"
        for limit in field.metadata
        for name, word in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _name(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(part) for part in get_args(annotation) if part is not type(None))
    return {int: "integer", float: "number", str: "string", bool: "true or false"}[annotation]


if __name__ == "__main__":
    sys.stdout.write(document())
