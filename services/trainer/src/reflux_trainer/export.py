"""The trained model as a folder: the parameters of a checkpoint beside the files of the model that it began as."""

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
from reflux_model.shapes import parameter_shapes
from reflux_storage.errors import StorageError
from reflux_storage.restore import read_index, read_tensors
from reflux_storage.stores import open_store
from reflux_storage.stores.options import S3Options
from reflux_trainer.checkpointing import CheckpointsAway, DatasetChanged
from reflux_trainer.parts import Parts

log = logging.getLogger(__name__)
FOLDER = "model-final"
STATE_SUFFIX = ".safetensors"


async def export_final(parts: Parts, source: Path, s3_endpoint: str) -> str:
    """Writes `model-final` below the run's folder from the checkpoint of the last step.

    Returns why there is none, or "": the run is done all the same, and its checkpoint stays.
    """
    try:
        checkpoint = await parts.checkpoints.latest()
        if checkpoint is None or checkpoint.cursor.step != parts.config.rl.steps:
            return "there is no checkpoint of the last step"
        with parts.waits.on("export", "the object store to send the trained model"):
            await asyncio.to_thread(export_model, source, checkpoint, parts.folder / FOLDER, s3_endpoint)
    except (StorageError, CheckpointsAway, DatasetChanged, OSError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def export_model(source: Path, checkpoint: checkpoint_pb2.Checkpoint, target: Path, s3_endpoint: str = "") -> None:
    """Writes a Hugging Face folder with the checkpoint's parameters and everything but the weights of `source`.

    Blocks; reads the parameters only, not the optimizer's moments. Raises StorageError, OSError, LookupError or
    ValueError; `target` is then as it was.
    """
    keys = [stored.key for stored in checkpoint.objects if stored.key.endswith(STATE_SUFFIX)]
    if len(keys) != 1:
        raise LookupError(f"{checkpoint.name} holds {len(keys)} learner states instead of one")
    config = config_from_hf(json.loads((source / CONFIG_FILE).read_text()))
    arrays = {name: np.empty(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    store = open_store(checkpoint.store_url, S3Options(endpoint=s3_endpoint or None))
    index = read_index(store, keys[0])
    read_tensors(store, index, {f"param/{name}": _bytes(array) for name, array in arrays.items()})
    # Renamed when it is complete: a folder that is there can be used.
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(
        source, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin")
    )
    save_file(arrays, partial / WEIGHTS_FILE, {"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    log.info("the trained model is in %s", target)


def _bytes(array: NDArray[np.float32]) -> memoryview:
    return memoryview(array)  # pyright: ignore[reportArgumentType]  (arrays do offer their buffer)
