"""What does the platform cost per step beside the model, and how soon is the first batch there?

Tiny model, warm stack, verdicts at once by a simulated instrument. Overhead of a step: its time without what the
learner computes and without the wait for groups (engines and verifications): the loop, the log of decisions, messages
to the learner, the weight sync as far as it is waited for, figures and records. First batch: from the start of a run to
its first batch, without supervised warm-up and without an evaluation worth mentioning (one prompt).
"""

import argparse
import asyncio
import json
import sys
from statistics import median

from instrument import VERIFIER, Instrument
from stack import Finished, document, finish, local_stack


def overhead_ms(run: Finished) -> list[float]:
    """Milliseconds of each step but the first."""
    parts = ("time/step", "time/wait_rollout", "trainer/compute_seconds")
    rows = list(zip(*(run.figures(name) for name in parts), strict=True))
    return [1e3 * (step - waited - computed) for step, waited, computed in rows[1:]]


async def measure(runs: int, steps: int) -> list[Finished]:
    """Equal runs, one after the other; the one that warms the stack is left out."""
    found = []
    rl = {"groups_per_step": 4, "samples_per_group": 4, "ramp_steps": 0, "verifier": VERIFIER}
    async with Instrument(lambda _payload: 0.0):
        for number in range(runs + 1):
            asked = document(f"overhead-{number}", warmup={"steps": 0}, rl=rl | {"steps": steps if number else 1})
            found.append(await finish(asked | {"seed": number}, 300))
    return found[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with local_stack():
        runs = asyncio.run(measure(options.runs, options.steps))
    steps = [value for run in runs for value in overhead_ms(run)]
    firsts = [run.figures("first_batch")[0] for run in runs]
    parts = {
        name for run in runs for event in run.steps for name in event["metrics"] if name.startswith("first_batch/")
    }
    for name in sorted(parts):
        print(f"{name:24} {median(run.figures(name)[0] for run in runs):7.2f} s")
    print(f"first batch {median(firsts):.2f} s [{min(firsts):.2f} {max(firsts):.2f}], {len(runs)} runs")
    print(f"overhead {median(steps):.1f} ms [{min(steps):.1f} {max(steps):.1f}], {len(steps)} steps")
    print(json.dumps({"first_batch_s": round(median(firsts), 3), "step_overhead_ms": round(median(steps), 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
