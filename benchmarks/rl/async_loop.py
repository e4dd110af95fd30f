"""What does it bring to train while slow verifications are out? The same work, synchronous and with `pace`, max_lag 4.

Both runs ask the same prompts, and the verification of a prompt takes the same time in both: log-normal, median 1 s,
99 % below 20 s, by a simulated instrument that sleeps. Nothing is discarded. The ideal is the same two policies on a
virtual clock, on the same draws, with the step time that was measured and no other cost.
"""

import argparse
import asyncio
import hashlib
import json
import math
import sys
from functools import cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy as np
from ideal import Ideal, simulate
from instrument import VERIFIER, Instrument
from stack import Finished, document, finish, local_stack

from reflux_runs.load import load_document
from reflux_trainer.problems import open_task, question

GROUPS, SAMPLES, MAX_LAG = 32, 8, 4
_MEDIAN, _P99 = 1.0, 20.0
_SIGMA = math.log(_P99 / _MEDIAN) / 2.3263478740408408  # 99 % quantile of the normal distribution
_LIMIT_SECONDS = 1500.0


def seconds_of(payload: bytes) -> float:
    """How long the verification of a problem takes: a draw that depends on its payload alone."""
    seed = int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest())
    return float(np.random.default_rng(seed).lognormal(math.log(_MEDIAN), _SIGMA))


def run_file(name: str, steps: int, **rl: object) -> dict[str, object]:
    """Equal but for the policy."""
    common = {
        "steps": steps,
        "groups_per_step": GROUPS,
        "samples_per_group": SAMPLES,
        "ramp_steps": 0,
        "verifier": VERIFIER,
        "verify_seconds": 600.0,
        "no_progress_seconds": 900.0,
    }
    return document(name, warmup={"steps": 0}, rl={**common, **rl})


def payloads(config: dict[str, object], count: int) -> list[float]:
    """Seconds of the first `count` training prompts."""
    with TemporaryDirectory() as cache_dir:
        task = open_task(load_document(dict(config)), Path(cache_dir))
        truths = [question(task, "train", index).truth for index in range(count)]
    return [seconds_of(json.dumps(truth, sort_keys=True, separators=(",", ":")).encode()) for truth in truths]


async def measure(name: str, steps: int, **rl: object) -> Finished:
    """One run on a warm stack of its own: in a shared one the result cache would know the other run's verdicts."""
    async with Instrument(seconds_of):
        await finish(run_file("warm", 1, groups_per_step=2), 120)
        found = await finish(run_file(name, steps, **rl), _LIMIT_SECONDS)
    print(f"{name}: {seconds(found):.1f} s for {steps} steps, idle {idle(found):.3f}", flush=True)
    return found


def seconds(run: Finished) -> float:
    """From the first issue to the end of the last step."""
    return run.steps[-1]["at"] - run.steps[0]["at"] + run.figures("time/step")[0]


def idle(run: Finished) -> float:
    """Share of that in which the learner did not compute."""
    return 1 - sum(run.figures("trainer/compute_seconds")) / seconds(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    with local_stack():
        sync = asyncio.run(measure("sync", options.steps, max_lag=0))
    with local_stack():
        pace = asyncio.run(measure("pace", options.steps, max_lag=MAX_LAG, staleness="pace"))
    step = median(pace.figures("trainer/compute_seconds"))
    draws = payloads(run_file("sync", options.steps), (options.steps + MAX_LAG + 1) * GROUPS)

    @cache
    def ideal(staleness: str, max_lag: int) -> Ideal:
        return simulate(
            lambda index: draws[index],
            staleness=staleness,  # type: ignore[arg-type]
            max_lag=max_lag,
            groups=GROUPS,
            steps=options.steps,
            step_seconds=step,
        )

    speedup = seconds(sync) / seconds(pace)
    ideal_speedup = ideal("wait", 0).seconds / ideal("pace", MAX_LAG).seconds
    print(f"learner's step {step * 1e3:.0f} ms, verification of a group {fmean(draws):.2f} s on average")
    print(f"ideal: {ideal('wait', 0).seconds:.1f} s and {ideal('pace', MAX_LAG).seconds:.1f} s, {ideal_speedup:.2f}x")
    print(
        f"lag: {max(pace.figures('lag/max')):.0f} at most, discarded tokens {sum(pace.figures('tokens/discarded')):.0f}"
    )
    figures = {
        "async_vs_sync": speedup,
        "async_vs_ideal": speedup / ideal_speedup,
        "idle_minus_ideal": idle(pace) - ideal("pace", MAX_LAG).idle,
        "samples_per_second_sync": options.steps * GROUPS * SAMPLES / seconds(sync),
        "samples_per_second_pace": options.steps * GROUPS * SAMPLES / seconds(pace),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
