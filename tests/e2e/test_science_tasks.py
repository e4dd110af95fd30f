"""The smoke examples of the tasks on crystals and reactions, through all services with their real verifiers."""

import tomllib
from pathlib import Path

import pytest

from reflux.trainer.v1.run_pb2 import Run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["crystal-structure", "synthesis-planning"])
async def test_a_science_task_warms_up_and_trains_two_steps(harness, task):
    document = tomllib.loads((EXAMPLES / task / "smoke.toml").read_text())
    ended = await harness.wait_end((await harness.create(document)).name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == 2
    assert summary["ledger"]["violations"] == []
