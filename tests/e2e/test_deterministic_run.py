"""A deterministic run equals a plain synchronous loop, and itself after a kill, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import Harness, small_run
from synchronous_reference import SynchronousRun

from reflux.trainer.v1.run_pb2 import Run
from reflux_runs.load import load_document

CURVE = ("loss", "grad_norm", "reward/mean", "entropy", "tokens/trained", "version")


def steps_of(run: Run) -> dict[int, dict[str, float]]:
    """The figures of each step."""
    events = [json.loads(line) for line in (Path(run.folder) / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["metrics"] for event in events if event["stage"] == "rl"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_deterministic_run_is_a_plain_loop_bit_for_bit_although_its_learner_is_killed(
    harness: Harness, tmp_path: Path
) -> None:
    document: dict[str, Any] = small_run("exact", rl={"steps": 10, "max_lag": 0}) | {"deterministic": True, "seed": 21}
    first = await harness.wait_end((await harness.create(document)).name)
    again = (await harness.create(document | {"name": "exact-again"})).name
    harness.kill(await harness.role_pid(await harness.wait_step(again, 3), "learner"))
    second = await harness.wait_end(again)
    assert (first.state, second.state) == (Run.STATE_SUCCEEDED, Run.STATE_SUCCEEDED), second.message
    one, other = steps_of(first), steps_of(second)
    assert sorted(one) == sorted(other) == list(range(1, 11))
    for step, figures in one.items():
        assert figures["logprob_gap_max"] == 0.0
        assert {name: other[step][name] for name in CURVE} == {name: figures[name] for name in CURVE}, step
    reference = SynchronousRun(load_document(document), tmp_path / "run", tmp_path / "cache")
    for step, plain in enumerate(reference.curve(), start=1):
        assert plain == tuple(one[step][name] for name in ("loss", "grad_norm", "entropy")), step
