"""Model folders in the Hugging Face layout: config.json and model.safetensors, or shards with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reflux_model.config import ModelConfig, config_from_hf
from reflux_model.creation import CONFIG_FILE, WEIGHTS_FILE, write_config
from reflux_model.errors import ModelFolderError
from reflux_model.parameters import check_parameters
from reflux_model.shapes import parameter_shapes

INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"


def save_folder(folder: Path, config: ModelConfig, params: Mapping[str, Tensor]) -> None:
    """Writes model.safetensors, then config.json, each atomically (rename); `transformers` loads the result."""
    check_parameters(params, config)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / (WEIGHTS_FILE + ".tmp")
    save_file(
        {name: params[name].detach().contiguous() for name in parameter_shapes(config)}, weights, {"format": "pt"}
    )
    weights.replace(folder / WEIGHTS_FILE)
    write_config(folder, config)


def load_config(folder: Path) -> ModelConfig:
    """Reads config.json. Raises `ModelFolderError` (missing, unreadable) or `UnsupportedModelError`."""
    return config_from_hf(_read_json(folder, CONFIG_FILE))


def load_folder(folder: Path, *, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads configuration and parameters, cast to `dtype`, in canonical order.

    Raises `ModelFolderError` naming the missing or broken file, `UnsupportedModelError`, or `ParameterMismatchError`.
    """
    config = load_config(folder)
    found: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        if not path.is_file():
            raise ModelFolderError(f"model folder {folder} is incomplete: {path.name} is missing", str(path))
        try:
            with safe_open(path, framework="pt") as weights:
                found |= {name: weights.get_tensor(name).to(dtype) for name in weights.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelFolderError(f"{path} is not a complete safetensors file: {error}", str(path)) from error
    check_tokenizer(folder, config)
    if config.tie_embeddings:
        found.pop("lm_head.weight", None)
    check_parameters(found, config)
    return config, {name: found[name] for name in parameter_shapes(config)}


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Raises `ModelFolderError` when the folder has a tokenizer with ids that the embedding lacks."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return
    content = _read_json(folder, TOKENIZER_FILE)
    vocabulary = content.get("model", {}).get("vocab", {})
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in content.get("added_tokens", [])]
    if ids and max(ids) >= config.vocab_size:
        raise ModelFolderError(
            f"{path} has token ids up to {max(ids)}, the model has {config.vocab_size} embeddings: it is that "
            f"of another model; copy the one that came with {CONFIG_FILE}",
            str(path),
        )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    shards = _read_json(folder, INDEX_FILE).get("weight_map", {})
    return [folder / name for name in sorted(set(shards.values()))]


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {folder} does not exist", str(folder))
    if not path.is_file():
        raise ModelFolderError(f"model folder {folder} is incomplete: {name} is missing", str(path))
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}", str(path)) from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object", str(path))
    return content
