"""The folder of one run on the trainer's host: configuration, split, fresh model, records of the run."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reflux_model.config import ModelConfig
from reflux_model.creation import EmbeddingRows, create_folder
from reflux_runs.config import RunConfig
from reflux_runs.load import dump_text
from reflux_runs.preflight import FRESH_CONTEXT_TOKENS
from reflux_tasks.task import Task


def model_folder(config: RunConfig, run_folder: Path) -> Path:
    """Where the run's first weights and its tokenizer are."""
    return Path(config.model.path) if config.model.path else run_folder / "model"


def prepare(config: RunConfig, run_folder: Path, task: Task[Any]) -> Path:
    """Writes what is missing and returns the model's folder; a second call changes nothing."""
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "config.toml").write_text(dump_text(config))
    split = {"task": config.task.name, "seed": config.seed, "split": task.split_record()}
    (run_folder / "split.json").write_text(json.dumps(split, indent=1) + "\n")
    folder = model_folder(config, run_folder)
    if not config.model.path and not folder.is_dir():
        _create_model(config, folder, task)
    return folder


def _create_model(config: RunConfig, folder: Path, task: Task[Any]) -> None:
    model = config.model
    shape = ModelConfig(
        vocab_size=len(task.words),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads,
        head_size=model.hidden_size // model.num_heads,
        max_positions=FRESH_CONTEXT_TOKENS,
        eos_token_id=task.ids[task.end_word],
        pad_token_id=task.ids[task.pad_word],
    )
    rows = task.initial_embedding(model.hidden_size, config.seed)
    with whole_folder(folder) as partial:
        create_folder(partial, shape, config.seed, rows=EmbeddingRows(*rows) if rows else None)
        task.write_tokenizer(partial)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A path beside `target`, where nothing is, which takes its place when the block is done: a folder that is there
    can be used, whatever is killed."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
