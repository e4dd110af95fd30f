"""The trained model leaves the run as a folder that any loader takes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux_model.folder import load_folder
from reflux_model.lora import LoraSpec, merged
from reflux_storage.errors import NotFound
from reflux_storage.stores import open_store
from reflux_storage.stream import write_tensors
from reflux_trainer.export import export_adapter, export_model
from reflux_trainer.learner.adapter_state import capture
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.journal import Journal
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.state import StateCapture

from .tiny import tiny_folder, train

KEY = "runs/r/1/learner-00000.safetensors"


def _checkpoint(url: str) -> checkpoint_pb2.Checkpoint:
    stored = checkpoint_pb2.StoredObject(key=KEY)
    return checkpoint_pb2.Checkpoint(name="checkpoints/r/1", store_url=url, objects=[stored])


def test_the_exported_folder_holds_the_trained_parameters_and_the_tokenizer(tmp_path: Path) -> None:
    source, target, url = tiny_folder(tmp_path / "model"), tmp_path / "model-final", f"file://{tmp_path}/store"
    (source / "tokenizer.json").write_text("{}")
    learner = Learner.from_folder(source, 0)
    train(learner, 2)
    capture = StateCapture()
    capture.take(learner, Journal(), 0)
    capture.write(open_store(url), KEY)
    for _ in range(2):  # a resumed run exports again
        export_model(source, _checkpoint(url), target)
    config, params = load_folder(target)
    assert config == learner.config
    assert all(torch.equal(params[name], tensor) for name, tensor in learner.params.items())
    assert not torch.equal(params["model.norm.weight"], load_folder(source)[1]["model.norm.weight"])
    assert (target / "tokenizer.json").read_text() == "{}"


def test_a_missing_object_leaves_no_half_folder(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "model")
    with pytest.raises(NotFound):
        export_model(source, _checkpoint(f"file://{tmp_path}/store"), tmp_path / "model-final")
    assert not list(tmp_path.glob("model-final*"))


def test_an_exported_adapter_gives_the_weights_that_replicas_had(tmp_path: Path) -> None:
    source, target, url = tiny_folder(tmp_path / "model"), tmp_path / "adapter-final", f"file://{tmp_path}/store"
    config, params = load_folder(source)
    adapter = LoraAdapter.fresh(config, LoraSpec(rank=4, groups=("attention", "mlp")), 0)
    adapter.flat.uniform_(-0.1, 0.1)
    write_tensors(open_store(url), KEY, capture(adapter, weights_only=False))
    export_adapter(source, _checkpoint(url), target, rank=4)
    settings = json.loads((target / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(source)
    assert settings["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    factors = load_file(target / "adapter_model.safetensors")
    whole = merged(params, adapter.params, adapter.spec)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        a, b = (factors.pop(f"base_model.model.{module}.lora_{half}.weight") for half in "AB")
        added = params[f"{module}.weight"] + settings["lora_alpha"] / settings["r"] * b @ a
        torch.testing.assert_close(added, whole[f"{module}.weight"].detach())
        assert not torch.equal(added, params[f"{module}.weight"])
    assert len(factors) == 2 * 2 * 7 - 4
