"""Problems of a run's task as token ids and payloads; what a run's configuration means to its task."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_runs.config import RunConfig
from reflux_runs.preflight import EXTERNAL, Catalog
from reflux_tasks.options import InvalidOption
from reflux_tasks.registry import create_task, task_names
from reflux_tasks.task import Split, Task
from reflux_trainer.clients.ladders import Rungs
from reflux_trainer.curriculum import CANDIDATES, PassRates

EVALUATION_SETS: Mapping[str, Mapping[str, Any]] = {
    "held": {},
    "one_phase": {"heldout_mixtures": 0.0},
    "two_phases": {"heldout_mixtures": 1.0},
}
"""Held-out sets by name: options on top of the run's; a task without such an option has the main set only."""


@dataclass(frozen=True)
class Question:
    """One problem, ready for model and verifier."""

    index: int
    prompt_text: str
    """In the task's words."""
    prose: str
    """In sentences, for a language model."""
    answer_text: str
    """The right answer with its end word."""
    truth: dict[str, Any]
    stratum: str = "all"
    """Kind of problem, for a curriculum."""


def task_options(config: RunConfig) -> dict[str, Any]:
    """Options of the task that the run file sets; everything else is the task's own default."""
    options: dict[str, Any] = {}
    if config.task.mixture_fraction is not None:
        options |= {"train_mixtures": config.task.mixture_fraction, "heldout_mixtures": config.task.mixture_fraction}
    if config.warmup.mixture_fraction is not None:
        options["warmup_mixtures"] = config.warmup.mixture_fraction
    if config.task.num_phases is not None:
        options["num_phases"] = config.task.num_phases
    if config.task.peaks_hidden:
        options["peaks_hidden"] = True
    return options


def rungs_of(config: RunConfig) -> Rungs | None:
    """What the groups of a run climb; None when they wait for the verifier."""
    rl = config.rl
    if rl.release == "full":
        return None
    return Rungs(
        rule=verifier_of(config, rl.rule) if rl.rule else "",
        surrogate=verifier_of(config, rl.surrogate),
        full=verifier_of(config, rl.verifier),
        algorithm=rl.algorithm,
        correction_lag=rl.correction_lag,
        audit_share=rl.audit_share,
        tolerated_error=rl.tolerated_error,
        full_cpu_seconds=rl.full_cpu_seconds,
    )


def verifier_of(config: RunConfig, name: str) -> str:
    """A verifier as the sandbox knows it: those of the run's task go by both names, external ones by their own."""
    return name if name.startswith(EXTERNAL) else f"{config.task.name}/{name}"


def open_task(config: RunConfig, cache_dir: Path, changes: Mapping[str, Any] | None = None) -> Task[Any]:
    """The task of a run. Raises UnknownTask or InvalidOption."""
    return create_task(config.task.name, config.seed, cache_dir, task_options(config) | dict(changes or {}))


def evaluation_tasks(config: RunConfig, cache_dir: Path) -> dict[str, Task[Any]]:
    """The held-out sets that the task knows, the main one first."""
    tasks: dict[str, Task[Any]] = {}
    for name, changes in EVALUATION_SETS.items():
        try:
            tasks[name] = open_task(config, cache_dir, changes)
        except InvalidOption:
            if not changes:
                raise
    return tasks


def question(task: Task[Any], split: Split, index: int) -> Question:
    """Problem `index` of a split."""
    problem = task.problem(split, index)
    return Question(
        index=index,
        prompt_text=task.prompt_text(problem),
        prose=task.prose(problem),
        answer_text=" ".join(task.answer_words(problem)),
        truth=task.truth(problem),
        stratum=task.stratum(problem),
    )


def chosen_problem(task: Task[Any], rates: PassRates | None, run_seed: int, index: int) -> int:
    """Number of the training problem that prompt `index` asks."""
    if rates is None:
        return index
    numbers = range(index * CANDIDATES, (index + 1) * CANDIDATES)
    strata = [task.stratum(task.problem("train", number)) for number in numbers]
    return numbers[rates.choose(strata, sampling_seed(run_seed, index) / 2**63)]


def fingerprint(config: RunConfig, task: Task[Any]) -> str:
    """Hash of task, options, seed and split: a checkpoint of another one is refused."""
    document = {"task": config.task.name, "seed": config.seed, "split": task.split_record()}
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def sampling_seed(run_seed: int, index: int) -> int:
    """Seed of one prompt's samples: a function of the run's seed and the prompt, the same after any crash."""
    digest = hashlib.blake2b(f"{run_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def catalog(config: RunConfig, cache_dir: Path) -> Catalog:
    """What is installed here, with the verifiers of the run's task. Quick: no problem is made, nothing is built."""
    names = task_names()
    if config.task.name not in names:
        return Catalog(tasks=names)
    return Catalog(tasks=names, verifiers={config.task.name: sorted(open_task(config, cache_dir).verifiers)})
