"""The smoke examples of the further tasks, through all services with their real verifiers."""

import os
import shutil
import tomllib
from pathlib import Path

import pytest

from reflux.trainer.v1.run_pb2 import Run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MEASURED = Path(os.environ.get("REFLUX_DATA", ROOT.parent / "shared" / "data")) / "xrd" / "measured"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["crystal-structure", "synthesis-planning"])
async def test_a_science_task_warms_up_and_trains_two_steps(harness, task):
    document = tomllib.loads((EXAMPLES / task / "smoke.toml").read_text())
    ended = await harness.wait_end((await harness.create(document)).name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == 2
    assert summary["ledger"]["violations"] == []


@pytest.mark.slow
async def test_a_laboratory_trains_two_steps_on_its_own_patterns(harness):
    if not MEASURED.is_dir():
        pytest.skip(f"measured X-ray data: {MEASURED} is not there; set REFLUX_DATA")
    patterns = Path(os.environ["REFLUX_STATE_DIR"]) / "cache" / "xrd-measured" / "patterns"
    patterns.mkdir(parents=True)
    for scan in MEASURED.glob("*_0p*--2min.xrdml"):
        shutil.copy(scan, patterns)
    document = tomllib.loads((EXAMPLES / "xrd-measured" / "smoke.toml").read_text())
    ended = await harness.wait_end((await harness.create(document)).name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == 2
    assert summary["ledger"]["violations"] == []
