"""How does a whole run compare with TRL's GRPOTrainer? SmolLM2-135M, the same prompts, groups, tokens and rewards.

The prompts are those of examples/xrd-phase-id/smollm2.toml: chats of 160 tokens, answers of 16 at most, 4 x 4 a
step; both sides train all weights.

Ours end to end: trainer, learner, weight sync, gateway, torch engine, rollout worker, sandbox and an outside caller
that grades; `max_lag` 1. TRL: one process, its own generation (deploy/bench/trl.sh makes its environment). Float32 on
both sides, no checkpointing of gradients, constant learning rate. Both have the machine's two cores: TRL by two
threads, ours by a learner and an engine of one thread each. Samples per second: all steps but the first one. Memory:
TRL's peak of resident memory; ours the largest sum of proportional shares (PSS) over all processes, Redis included.
TRL computes a batch in one pass, as it does when nothing is said; the figures that end in `_cut`, without bars, are
against TRL with a pass per group, which needs half the memory.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import psutil
from instrument import VERIFIER, Instrument
from score import score
from stack import Finished, document, finish, local_stack

from reflux_client import connection
from reflux_runs.load import load_document
from reflux_trainer.codec import Codec
from reflux_trainer.problems import open_task, question

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
MODEL = ROOT / ".reflux" / "engines" / "smollm2-135m"
GROUPS, SAMPLES, MAX_TOKENS = 4, 4, 16
_LIMIT_SECONDS = 1200.0
_SAMPLE_SECONDS = 1.0


def run_file(model: Path, steps: int) -> dict[str, object]:
    """Our side."""
    return document(
        "trl",
        task={"mixture_fraction": 0.0, "num_phases": 8, "prompt": "chat"},
        model={"path": str(model)},
        warmup={"steps": 0},
        rl={
            "steps": steps,
            "groups_per_step": GROUPS,
            "samples_per_group": SAMPLES,
            "max_tokens": MAX_TOKENS,
            "learning_rate": 1e-5,
            "ramp_steps": 0,
            "final_lr_fraction": 1.0,
            "verifier": VERIFIER,
            "no_progress_seconds": 600.0,
        },
        fleet={"weight_mode": "in_place", "sync_timeout_seconds": 120.0},
    )


async def ours(run: dict[str, object]) -> tuple[Finished, int]:
    """The finished run, and the peak of the stack's memory in bytes."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, await asyncio.to_thread(stack_bytes))
            await asyncio.sleep(_SAMPLE_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        async with Instrument(lambda _payload: 0.0, lambda answers: [score(answer) for answer in answers]):
            return await finish(run, _LIMIT_SECONDS), peak
    finally:
        watching.cancel()


def stack_bytes() -> int:
    """Proportional set size of the stack's processes."""
    record = connection.read_record()
    assert record is not None
    total, root = 0, psutil.Process(record.pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def theirs(model: Path, prompts: list[str], steps: int, passes: int = 1) -> tuple[list[float], int]:
    """Seconds of each step but the first, and the peak of memory in bytes; a step's batch is cut into `passes`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps(prompts))
        arguments = [model, path, steps, GROUPS, SAMPLES, MAX_TOKENS, 2, passes]
        command = [str(PYTHON), str(Path(__file__).parent / "trl_peer.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    ends = [line["at"] for line in lines if "at" in line]
    return [after - before for before, after in pairwise(ends)], lines[-1]["peak_rss_bytes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if not (PYTHON.exists() and MODEL.exists()):
        print(f"left out: {PYTHON} (deploy/bench/trl.sh) or {MODEL} (deploy/engines/model.sh) does not exist")
        print(json.dumps({}))
        return 0
    run = run_file(MODEL, options.steps)
    with tempfile.TemporaryDirectory() as cache:
        config = load_document(dict(run))
        task, codec = open_task(config, Path(cache)), Codec.of_run(config, MODEL)
        prompts = [codec.prompt_text(question(task, "train", index)) for index in range(options.steps * GROUPS)]
    peer_seconds, peer_bytes = theirs(MODEL, prompts, options.steps)
    print(f"TRL: {tell(peer_seconds)}, peak {peer_bytes / 2**30:.2f} GiB", flush=True)
    cut_seconds, cut_bytes = theirs(MODEL, prompts, options.steps, GROUPS)
    print(f"TRL, a pass per group: {tell(cut_seconds)}, peak {cut_bytes / 2**30:.2f} GiB", flush=True)
    with local_stack():
        finished, our_bytes = asyncio.run(ours(run))
    ends = [event["at"] for event in finished.steps]
    our_seconds = [after - before for before, after in pairwise(ends)]
    print(f"reflux: {tell(our_seconds)}, peak {our_bytes / 2**30:.2f} GiB")
    print(f"tokens of a step: {median(finished.figures('tokens/trained')):.0f} trained; gap of log-probs "
          f"{max(finished.figures('logprob_gap_max')):.1e}")  # fmt: skip
    figures = {
        "vs_trl_samples": fmean(peer_seconds) / fmean(our_seconds),
        "vs_trl_memory": our_bytes / peer_bytes,
        "vs_trl_samples_cut": fmean(cut_seconds) / fmean(our_seconds),
        "vs_trl_memory_cut": our_bytes / cut_bytes,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


def tell(seconds: list[float]) -> str:
    """Rate and spread of a side's steps."""
    rate, spread = GROUPS * SAMPLES * len(seconds) / sum(seconds), f"[{min(seconds):.2f} {max(seconds):.2f}]"
    return f"{rate:.2f} samples/s, step {median(seconds):.2f} s {spread}, {len(seconds)} steps"


if __name__ == "__main__":
    sys.exit(main())
