"""The loops of tinker-cookbook, unmodified, against the whole stack: `make test-tinker` makes their environment."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from e2e_stack import HANG_SECONDS
from e2e_tinker import BASE, KEY

PYTHON = Path(os.environ.get("REFLUX_TEST_TINKER", ".venv-tinker")).absolute() / "bin/python"
LOOP = Path(__file__).parent / "cookbook_loop.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="the cookbook is not installed: make test-tinker"),
]


async def run_loop(harness, tmp_path, mode):
    url, base = f"http://{harness.record.http['trainer']}", str(harness.folder / "tinker" / "base")
    process = await asyncio.create_subprocess_exec(
        PYTHON, LOOP, url, str(tmp_path / mode), mode, BASE, base,
        env=os.environ | {"TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), HANG_SECONDS)
    assert process.returncode == 0, errors.decode()[-4000:]
    return json.loads(output.decode().splitlines()[-1])["steps"]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_rl_loop_of_the_cookbook_learns(harness, tmp_path, mode):
    steps = await run_loop(harness, tmp_path, mode)
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    assert len(rewards) >= 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    gaps = [abs(step["optim/kl_sample_train_v1"]) for step in steps if "optim/kl_sample_train_v1" in step]
    assert gaps
    if mode == "sync":
        assert max(gaps) < 1e-4, "sampler and learner disagree"
    checkpoints = (tmp_path / mode / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(checkpoints[-1])["state_path"].startswith("tinker://")


async def test_the_supervised_loop_of_the_cookbook_learns(harness, tmp_path):
    steps = await run_loop(harness, tmp_path, "supervised")
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2, losses
