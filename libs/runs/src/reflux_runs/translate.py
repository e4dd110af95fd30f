"""`RunConfig` on the wire: unset fields of the message take the defaults of the run file."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from reflux.trainer.v1 import run_pb2 as pb
from reflux_runs.config import RunConfig
from reflux_runs.load import load_document


def from_message(message: pb.RunConfig) -> RunConfig:
    """Reads the fields that are set. Raises ConfigError."""
    return load_document(_set_fields(message))


def changes_of(message: pb.RunConfig) -> dict[str, Any]:
    """The fields that are set, nested as in a run file: what `load.changed` takes."""
    return _set_fields(message)


def to_changes(document: Mapping[str, Any]) -> pb.RunConfig:
    """A part of a run file, with its keys alone set. Raises ConfigError."""
    message = pb.RunConfig()
    _fill(message, load_document(document).model_dump(exclude_unset=True, exclude_none=True))
    return message


def to_message(config: RunConfig) -> pb.RunConfig:
    """The configuration with all fields set."""
    message = pb.RunConfig()
    _fill(message, config.model_dump(exclude_none=True))
    return message


def _set_fields(message: Message) -> dict[str, Any]:
    # ListFields leaves out absent fields; a plain string (the name) counts as absent when it is empty.
    return {
        field.name: _set_fields(value) if isinstance(value, Message) else value for field, value in message.ListFields()
    }


def _fill(message: Message, document: dict[str, Any]) -> None:
    for name, value in document.items():
        if isinstance(value, dict):
            section = getattr(message, name)
            section.SetInParent()
            _fill(section, value)
        else:
            setattr(message, name, value)
