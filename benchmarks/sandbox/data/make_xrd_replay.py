"""Makes `xrd_replay.json`: the groups that a policy answered in a short run, with real surrogate and full grades.

    python benchmarks/sandbox/data/make_xrd_replay.py [--steps 24] [--groups 8]

The recipe of benchmarks/policy_recipe (warm-up, then GRPO on the label reward) runs in this process; the first `groups`
groups that each step samples are kept in their order, those without signal too. Every different answer of a group is
then graded once by the product's own surrogate and full verifier. Answers that name the same set of phases are one:
the result cache runs them once, and so they cost once here. Takes some minutes of one core.

A row of `groups` is [step, class of each sample, classes]; a class is [surrogate reward, full reward, CPU seconds of
the full verifier, its child processes included]. An answer against the grammar is a class of its own with rewards 0.
"""

import argparse
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "policy_recipe"))

from recipe import Recipe, Run  # noqa: E402 a benchmark's module, not an installed one

from reflux_tasks.registry import create_task  # noqa: E402
from reflux_tasks.task import Problem, Task  # noqa: E402
from reflux_tasks.verify import VerificationError  # noqa: E402
from reflux_tasks.wording import InvalidAnswer  # noqa: E402
from reflux_tasks.xrd.answers import parse_answer  # noqa: E402


class Recorder(Run):
    """A run that keeps the first `groups` groups of each step."""

    def __init__(self, recipe: Recipe, task: Task[Any], groups: int) -> None:
        super().__init__(recipe, task)
        self.step = 0
        self.kept: list[tuple[int, Problem, list[list[str]]]] = []
        self._groups = groups

    def rewards(self, problem: Problem, answers: list[list[int]]) -> list[float]:
        """Label rewards, and a record of what was asked."""
        if sum(step == self.step for step, *_ in self.kept) < self._groups:
            self.kept.append((self.step, problem, [[self.task.words[t] for t in tokens] for tokens in answers]))
        return super().rewards(problem, answers)


def answer_class(words: Sequence[str]) -> str:
    """Key under which two answers are the same experiment: the set of phases, however it is ordered."""
    try:
        named = [phase.text for phase in parse_answer(words)]
    except InvalidAnswer:
        return ""
    return " + ".join(sorted(named))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def graded(task: Task[Any], problem: Problem, answers: list[list[str]]) -> list[Any]:
    """Class of each sample, and the grades of each class; a class without a full verdict has None."""
    truth, keys = task.truth(problem), [answer_class(words) for words in answers]
    order = list(dict.fromkeys(keys))
    classes = []
    for key in order:
        words = answers[keys.index(key)]
        surrogate = task.verifiers["surrogate"].grade(truth, [words])[0]
        before = cpu_seconds()
        try:
            full: float | None = round(task.verifiers["full"].grade(truth, [words])[0].reward, 4)
        except VerificationError:
            full = None
        classes.append([round(surrogate.reward, 4), full, round(cpu_seconds() - before, 3)])
    return [[order.index(key) for key in keys], classes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/reflux").expanduser())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "xrd_replay.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = create_task("xrd-phase-id", options.seed, options.cache)
    for verifier in task.verifiers.values():
        verifier.prepare()
    recipe = Recipe(seed=options.seed, steps=options.steps)
    run = Recorder(recipe, task, options.groups)
    for _ in run.warm_up():
        pass
    for step, _ in run.reinforce():
        run.step = step + 1
    rows = []
    for number, (step, problem, answers) in enumerate(run.kept):
        rows.append([step, *graded(task, problem, answers)])
        print(f"{number + 1} of {len(run.kept)} groups", file=sys.stderr)
    about = {
        "task": f"xrd-phase-id, seed {options.seed}, 128 phases, 30 % mixtures",
        "policy": f"policy_recipe, 200 warm-up steps, then {options.steps} GRPO steps, 8 samples per group",
        "verifiers": {name: task.verifiers[name].version for name in ("surrogate", "full")},
    }
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    options.out.write_text(f'{{"about":{json.dumps(about)},\n"groups":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
