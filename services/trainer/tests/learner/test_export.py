"""The trained model leaves the run as a folder that any loader takes."""

from pathlib import Path

import pytest
import torch

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux_model.folder import load_folder
from reflux_storage.errors import NotFound
from reflux_storage.stores import open_store
from reflux_trainer.export import export_model
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.journal import Journal
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
