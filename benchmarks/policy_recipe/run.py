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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/reflux").expanduser())
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--peaks-hidden", action="store_true")
    parser.add_argument("--every", type=int, default=25, help="steps between progress lines")
    for field in dataclasses.fields(Recipe):
        kind = type(field.default)
        if kind is bool:
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    arguments = parser.parse_args()
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Recipe)})
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    options = {"peaks_hidden": True} if arguments.peaks_hidden else {}
    run = Run(recipe, create_task("xrd-phase-id", recipe.seed, arguments.cache, options))
    for step, loss in run.warm_up():
        if step % 50 == 0:
            print(f"warm-up {step} loss {loss:.3f} wall {time.perf_counter() - started:.1f}", file=sys.stderr)
    before = evaluate(run, arguments.prompts)
    print("after warm-up", before, file=sys.stderr)
    for step, figures in run.reinforce():
        if (step + 1) % arguments.every == 0:
            text = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
            held = evaluate(run, arguments.prompts, 1)["greedy"] if arguments.every < 1000 else 0.0
            print(f"step {step + 1} {text} held {held} wall {time.perf_counter() - started:.1f}", file=sys.stderr)
    after = evaluate(run, arguments.prompts)
    seconds = run.clock.seconds
    result = {
        "recipe": dataclasses.asdict(recipe),
        "peaks_hidden": arguments.peaks_hidden,
        "after_warmup": before,
        "after_rl": after,
        "gain": round(after["greedy"] - before["greedy"], 4),
        "prompts_issued": run.next_prompt,
        "groups_filtered": run.filtered,
        "ms_per_step": {
            name: round(1e3 * value / (recipe.warmup_steps if "warmup" in name else max(1, recipe.steps)), 1)
            for name, value in seconds.items()
        },
        "wall_seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
