"""Runs the recipe for one seed and prints its held-out figures as one JSON object on the last line."""

import argparse
import dataclasses
import json
import platform
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from recipe import Recipe, Run

from reflux_tasks.registry import create_task


def evaluate(run: Run, prompts: int, samples: int = 4) -> dict[str, float]:
    """Greedy and sampled mean rewards on the held-out set, in all and by number of phases."""
    problems = [run.task.problem("heldout", index) for index in range(prompts)]
    ids = [run.task.prompt_ids(problem) for problem in problems]
    single = np.array([len(run.task.truth(problem)["phases"]) == 1 for problem in problems])
    figures: dict[str, float] = {}
    for name, count, temperature in (("greedy", 1, 0.0), ("sampled", samples, 1.0)):
        answers = run.answers(run.learner.params, ids, count, temperature, seed=99)
        rewards = [
            run.rewards(problem, [tokens for tokens, _ in members])
            for problem, members in zip(problems, answers, strict=True)
        ]
        means = np.mean(rewards, 1)
        figures[name] = float(means.mean())
        if temperature == 0:
            figures["greedy_single"] = float(means[single].mean())
            figures["greedy_pairs"] = float(means[~single].mean())
            figures["exact"] = float((means == 1).mean())
    return {name: round(value, 4) for name, value in figures.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/reflux").expanduser())
    parser.add_argument("--prompts", type=int, default=400, help="held-out prompts")
    parser.add_argument("--peaks-hidden", action="store_true", help="control: elements only")
    parser.add_argument("--every", type=int, default=0, help="steps between evaluations; 0 evaluates at the ends only")
    for field in dataclasses.fields(Recipe):
        kind = type(field.default)
        if kind is bool:
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    return parser.parse_args()


def train(run: Run, arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Held-out figures after warm-up and after RL; progress goes to stderr."""
    for step, loss in run.warm_up():
        if step % 50 == 0:
            print(f"warm-up {step} loss {loss:.3f}", file=sys.stderr)
    before = evaluate(run, arguments.prompts)
    print("after warm-up", before, file=sys.stderr)
    for step, figures in run.reinforce():
        if arguments.every and (step + 1) % arguments.every == 0:
            text = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"step {step + 1} {text} held {evaluate(run, arguments.prompts, 1)['greedy']}", file=sys.stderr)
    return before, evaluate(run, arguments.prompts)


def main() -> None:
    arguments = parse()
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Recipe)})
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    run = Run(
        recipe, create_task("xrd-phase-id", recipe.seed, arguments.cache, {"peaks_hidden": arguments.peaks_hidden})
    )
    before, after = train(run, arguments)
    steps = {"warmup_data": recipe.warmup_steps, "warmup_train": recipe.warmup_steps}
    result = {
        "recipe": dataclasses.asdict(recipe),
        "peaks_hidden": arguments.peaks_hidden,
        "after_warmup": before,
        "after_rl": after,
        "gain": round(after["greedy"] - before["greedy"], 4),
        "prompts_issued": run.next_prompt,
        "groups_filtered": run.filtered,
        "cpu_ms_per_step": {
            name: round(1e3 * seconds / max(1, steps.get(name, recipe.steps)), 1)
            for name, seconds in run.clock.seconds.items()
        },
        "wall_seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
