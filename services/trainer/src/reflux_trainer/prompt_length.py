"""How long a run's prompts are, found before anything starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal
from reflux_runs.preflight import Catalog
from reflux_tasks.task import Task
from reflux_trainer.codec import Codec
from reflux_trainer.problems import question

_PROMPTS = 16
"""Training prompts that are looked at where their lengths differ."""


def with_prompt(known: Catalog, config: RunConfig, task: Task[Any]) -> Catalog:
    """The catalog with the length of a prompt, which may cost seconds the first time a task is used on a machine.

    Raises ConfigError when the folder's tokenizer cannot say it; a folder that is incomplete is for `preflight`.
    """
    folder = Path(config.model.path)
    if not config.model.path:
        length = len(task.prompt_words(task.problem("train", 0)))
    elif not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return known
    else:
        length = _longest(config, folder, task)
    return replace(known, prompt_tokens={task.name: length})


def _longest(config: RunConfig, folder: Path, task: Task[Any]) -> int:
    try:
        codec = Codec.of_run(config, folder)
        return max(len(codec.prompt_ids(question(task, "train", index))) for index in range(_PROMPTS))
    except ValueError as error:
        works = 'a folder whose tokenizer fits the task, or task.prompt = "text" for a language model'
        raise ConfigError((Refusal("model.path", str(folder), str(error), works),)) from None
