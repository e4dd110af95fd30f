"""What a run has learnt as a folder that others load: a whole model, or a LoRA adapter in the layout of PEFT."""

import asyncio
import json
import logging
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux_model.config import config_from_hf
from reflux_model.creation import CONFIG_FILE, WEIGHTS_FILE
from reflux_model.shapes import LORA_ALPHA, parameter_shapes
from reflux_storage.errors import StorageError
from reflux_storage.restore import TensorIndex, read_index, read_tensors
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options
from reflux_trainer.checkpointing import CheckpointsAway, DatasetChanged
from reflux_trainer.folder import whole_folder
from reflux_trainer.parts import Parts

log = logging.getLogger(__name__)
FOLDER = "model-final"
ADAPTER_FOLDER = "adapter-final"
STATE_SUFFIX = ".safetensors"
_PARAMETER = "param/"
_PEFT_PREFIX = "base_model.model."


async def export_final(parts: Parts, source: Path, s3_endpoint: str) -> str:
    """Writes `model-final`, of a LoRA run `adapter-final`, below the run's folder from the checkpoint of the last step.

    Returns why there is none, or "": the run is done all the same, and its checkpoint stays.
    """
    try:
        checkpoint = await parts.checkpoints.latest()
        if checkpoint is None or checkpoint.cursor.step != parts.config.rl.steps:
            return "there is no checkpoint of the last step"
        with parts.waits.on("export", "the object store to send the trained model"):
            if rank := parts.config.model.lora_rank:
                target = parts.folder / ADAPTER_FOLDER
                await asyncio.to_thread(export_adapter, source, checkpoint, target, rank, s3_endpoint)
            else:
                await asyncio.to_thread(export_model, source, checkpoint, parts.folder / FOLDER, s3_endpoint)
    except (StorageError, CheckpointsAway, DatasetChanged, OSError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def export_model(source: Path, checkpoint: checkpoint_pb2.Checkpoint, target: Path, s3_endpoint: str = "") -> None:
    """Writes a Hugging Face folder with the checkpoint's parameters and everything but the weights of `source`.

    Blocks; reads the parameters only, not the optimizer's moments. Raises StorageError, OSError, LookupError or
    ValueError; `target` is then as it was.
    """
    config = config_from_hf(json.loads((source / CONFIG_FILE).read_text()))
    arrays = {name: np.empty(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    store, index = _state(checkpoint, s3_endpoint)
    read_tensors(store, index, {_PARAMETER + name: _bytes(array) for name, array in arrays.items()})
    weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin")
    with whole_folder(target) as partial:
        shutil.copytree(source, partial, ignore=weights)
        save_file(arrays, partial / WEIGHTS_FILE, {"format": "pt"})
    log.info("the trained model is in %s", target)


def export_adapter(
    source: Path, checkpoint: checkpoint_pb2.Checkpoint, target: Path, rank: int, s3_endpoint: str = ""
) -> None:
    """Writes the checkpoint's adapter of the model `source` as PEFT reads it. Blocks; errors as in `export_model`."""
    store, index = _state(checkpoint, s3_endpoint)
    shapes = {
        name.removeprefix(_PARAMETER): span.spec.shape
        for name, span in index.spans.items()
        if name.startswith(_PARAMETER)
    }
    arrays = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    read_tensors(store, index, {_PARAMETER + name: _bytes(array) for name, array in arrays.items()})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": rank,
        "lora_alpha": int(LORA_ALPHA),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in arrays}),
        "inference_mode": True,
    }
    with whole_folder(target) as partial:
        partial.mkdir(parents=True)
        named = {_PEFT_PREFIX + name: array for name, array in arrays.items()}
        save_file(named, partial / "adapter_model.safetensors", {"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    log.info("the trained adapter is in %s", target)


def _state(checkpoint: checkpoint_pb2.Checkpoint, s3_endpoint: str) -> tuple[ObjectStore, TensorIndex]:
    """The one state that a checkpoint of one rank holds."""
    keys = [stored.key for stored in checkpoint.objects if stored.key.endswith(STATE_SUFFIX)]
    if len(keys) != 1:
        raise LookupError(f"{checkpoint.name} holds {len(keys)} learner states instead of one")
    store = open_store(checkpoint.store_url, S3Options(endpoint=s3_endpoint or None))
    return store, read_index(store, keys[0])


def _bytes(array: NDArray[np.float32]) -> memoryview:
    return memoryview(array)  # pyright: ignore[reportArgumentType]  (arrays do offer their buffer)
