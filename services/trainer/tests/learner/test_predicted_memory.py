"""The preflight's prediction against processes that do the work."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reflux_model.config import ModelConfig
from reflux_model.creation import create_folder
from reflux_runs.load import load_document
from reflux_runs.memory import FRESH_VOCABULARY, predict, shape_of

PEAK = Path(__file__).parent / "learner_peak.py"
PROMPT_TOKENS = 96
WIDE = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "intermediate_size": 1536}
BATCH = {"groups_per_step": 4, "samples_per_group": 8, "max_tokens": 64}


def measured(document: dict[str, Any], folder: Path) -> int:
    """Peak of a process of its own that takes a step of the run, in bytes."""
    model = load_document(document).model
    shape = ModelConfig(
        vocab_size=FRESH_VOCABULARY,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads,
        head_size=model.hidden_size // model.num_heads,
        max_positions=1024,
    )
    create_folder(folder, shape, 0)
    command = [sys.executable, str(PEAK), json.dumps(document), str(folder), str(PROMPT_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    ("model", "fleet"),
    [
        pytest.param({}, {}, id="tiny"),
        pytest.param(WIDE, {}, id="all weights", marks=pytest.mark.slow),
        pytest.param(WIDE | {"gradient_checkpointing": True}, {}, id="recomputed", marks=pytest.mark.slow),
        pytest.param(WIDE | {"lora_rank": 16}, {}, id="adapter", marks=pytest.mark.slow),
        pytest.param(
            WIDE | {"compute_dtype": "bfloat16"}, {"weight_dtype": "bfloat16"}, id="narrow", marks=pytest.mark.slow
        ),
    ],
)
def test_the_learners_peak_is_about_what_was_predicted(
    model: dict[str, Any], fleet: dict[str, Any], tmp_path: Path
) -> None:
    document = {"model": model, "rl": BATCH, "fleet": fleet, "warmup": {"steps": 0}}
    config = load_document(document)
    shape = shape_of(config)
    assert shape is not None
    peak = measured(document, tmp_path / "model")
    predicted = predict(config, replace(shape, vocabulary=FRESH_VOCABULARY), PROMPT_TOKENS).learner_bytes
    print(f"{model}: measured {peak / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f} MiB")
    assert 0.75 < predicted / peak < 1.5
