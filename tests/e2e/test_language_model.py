"""Runs that train an adapter of a language model in its own chat format: a tiny one, and (slow) SmolLM2-135M itself."""

import json
import os
import signal
from pathlib import Path

import pytest
from e2e_language_model import write_language_model
from e2e_stack import small_run

from reflux.trainer.v1.run_pb2 import Run
from reflux_runs.load import load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "xrd-phase-id" / "smollm2.toml"
SMOLLM2 = ROOT / ".reflux" / "engines" / "smollm2-135m"


def rl_steps(folder: Path) -> list[dict[str, float]]:
    """Figures of the run's steps."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["stage"] == "rl"]


async def test_an_adapter_of_a_language_model_is_trained_in_chats(harness, tmp_path):
    document = small_run(
        "language-model",
        task={"num_phases": 2, "prompt": "chat"},
        model={"path": str(write_language_model(tmp_path / "model")), "lora_rank": 8},
        warmup={"steps": 40, "batch_size": 4, "learning_rate": 2e-2},
        rl={"steps": 2, "groups_per_step": 2, "samples_per_group": 8, "max_tokens": 20, "learning_rate": 1e-3},
        evaluation={"prompts": 2, "intermediate_prompts": 2, "surrogate_prompts": 0},
        fleet={"engines": 1, "rollout_workers": 1},
    )
    ended = await harness.wait_end((await harness.create(document)).name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    folder = Path(ended.folder)
    steps = rl_steps(folder)
    assert [metrics["version"] for metrics in steps] == [41, 42]
    assert steps[0]["logprob_gap_max"] < 1e-3, "replicas have the weights with the adapter added in"
    assert json.loads((folder / "adapter-final" / "adapter_config.json").read_text())["r"] == 8
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("<|im_start|>user\nWhich crystal phase")
    assert "<|im_end|>" not in sample["answer"]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2: `make demo-smollm2` or deploy/engines/model.sh makes it")
async def test_the_example_of_smollm2_goes_on_after_its_learner_was_killed(harness):
    document = load_file(EXAMPLE).model_dump(exclude_none=True)
    document["task"] |= {"num_phases": 4}
    document["model"] |= {"path": str(SMOLLM2)}
    document["warmup"] |= {"batch_size": 4}
    document["rl"] |= {"steps": 2, "groups_per_step": 2}
    document["evaluation"] |= {"prompts": 2, "intermediate_prompts": 2}
    document["checkpoint"] |= {"every_steps": 1}
    created = await harness.create(document)
    run = await harness.wait_step(created.name, 1)
    os.kill(await harness.role_pid(run, "learner"), signal.SIGKILL)
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    assert harness.summary(ended)["ledger"]["violations"] == []
    steps = rl_steps(Path(ended.folder))
    warmed_up = document["warmup"]["steps"]
    assert [metrics["version"] for metrics in steps] == [warmed_up + 1, warmed_up + 2]
    assert steps[0]["logprob_gap_max"] < 1e-3
