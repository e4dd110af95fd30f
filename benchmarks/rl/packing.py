"""Which share of what a learner computes over are tokens, on batches with the lengths of the demo?

Prompts are those of the demo's task; a group's answers have the lengths of right answers to problems drawn at random,
as a policy writes them that knows the form but not the phase. Figure: tokens fed / (rows * width), summed over the
micro-batches of all steps. Beside it, the share if every group had rows of its own.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from reflux_model.packing import PackedRows
from reflux_tasks.registry import create_task
from reflux_tasks.task import Task
from reflux_trainer.learner.batching import pack_placed, parts_of
from reflux_trainer.learner.ops import CompletionData, GroupData


def batch(task: Task, step: int, groups: int, samples: int, generator: np.random.Generator) -> list[GroupData]:
    """One step's groups."""
    found = []
    for index in range(step * groups, (step + 1) * groups):
        others = generator.integers(0, 4096, samples)
        answers = [task.answer_ids(task.problem("train", int(other))) for other in others]
        prompt = task.prompt_ids(task.problem("train", index))
        found.append(GroupData(prompt, [CompletionData(answer) for answer in answers]))
    return found


def fed(group: GroupData) -> int:
    """Tokens of a group that go through the model."""
    return len(group.prompt) + sum(len(completion.token_ids) - 1 for completion in group.completions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    cache = Path(tempfile.gettempdir()) / "reflux-xrd-phases"
    task, generator = create_task("xrd-phase-id", 0, cache), np.random.default_rng(1)
    tokens = cells = padded = 0
    for step in range(options.steps):
        for part in parts_of(batch(task, step, options.groups, options.samples, generator)):
            rows: PackedRows = pack_placed(part)
            lengths = [fed(placed.group) for placed in part]
            tokens += sum(lengths)
            cells += rows.tokens_RS.numel()
            padded += len(lengths) * max(lengths)
    print(f"{tokens} tokens in {cells} places; with a row per group in {padded}: {tokens / padded:.3f}")
    print(json.dumps({"packing_efficiency": round(tokens / cells, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
