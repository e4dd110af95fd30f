"""A run file on its way to the trainer: read, overridden, checked here, before anything starts."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reflux.trainer.v1.run_pb2 import RunConfig as RunConfigMessage
from reflux_client.connection import ClientError
from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError
from reflux_runs.load import changed, load_document, load_file, load_toml, merged
from reflux_runs.preflight import Counts, preflight
from reflux_runs.translate import to_changes, to_message


def load_run_file(
    path: Path, seed: int | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> RunConfigMessage:
    """Reads and checks a run file. Raises `ClientError` with every key that is wrong and a value that would work."""
    return to_message(_checked(path, seed, overrides)[0])


def counts_of(path: Path, seed: int | None = None) -> Counts:
    """What a run file amounts to. Raises `ClientError` as `load_run_file` does."""
    return _checked(path, seed, None)[1]


def _checked(
    path: Path, seed: int | None, overrides: Mapping[str, Mapping[str, Any]] | None
) -> tuple[RunConfig, Counts]:
    try:
        config = load_file(path)
        if seed is not None or overrides:
            config = _override(path, seed, overrides or {})
        config = _with_whole_path(config)
        return config, preflight(config)
    except ConfigError as error:
        raise ClientError(f"{path}: {error}") from None


def load_changes(path: Path | None, settings: Sequence[str]) -> RunConfigMessage:
    """A part of a run file, changed by KEY=VALUE settings; a value that is no TOML is a text. Raises `ClientError`."""
    try:
        document = load_toml(path) if path else {}
        for setting in settings:
            document = merged(document, _setting(setting))
        return to_changes(document)
    except ConfigError as error:
        raise ClientError(f"{path or '--set'}: {error}") from None


def _with_whole_path(config: RunConfig) -> RunConfig:
    """The run's processes work in folders of their own, where a path relative to this one means something else."""
    if not config.model.path:
        return config
    return changed(config, {"model": {"path": str(Path(config.model.path).absolute())}})


def _setting(text: str) -> dict[str, Any]:
    key, sign, value = text.partition("=")
    for written in (value, json.dumps(value)):
        try:
            if sign:
                return tomllib.loads(f"{key} = {written}")
        except tomllib.TOMLDecodeError:
            continue
    raise ClientError(f"--set {text!r} is not KEY=VALUE, for example rl.learning_rate=1e-4")


def _override(path: Path, seed: int | None, overrides: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    document = tomllib.loads(path.read_text())
    for section, values in overrides.items():
        document[section] = {**document.get(section, {}), **values}
    if seed is not None:
        document["seed"] = seed
    return load_document(document)
