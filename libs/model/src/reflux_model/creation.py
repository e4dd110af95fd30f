"""Random initialisation of a model and of its Hugging Face folder. Free of torch, so that a controller can do it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from reflux_model.config import ModelConfig, config_to_hf
from reflux_model.errors import ParameterMismatchError
from reflux_model.shapes import parameter_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class EmbeddingRows:
    """Embedding rows from token id `first` on that start from structure instead of noise; `values` is (count, E)."""

    first: int
    values: NDArray[np.float32]


def fourier_rows(
    first: int, count: int, hidden_size: int, seed: int, *, scale: float = 0.04, noise: float = 0.004
) -> EmbeddingRows:
    """Rows for tokens that stand for a continuous axis, such as two-theta bins: neighbours start similar, far rows not.

    Row j gets `scale` times sines and cosines of x = j / count at `hidden_size // 4` frequencies, geometric from half a
    turn to count / 5 turns over the whole axis, plus Gaussian noise.
    """
    axis = np.arange(count)[:, None] / count
    octaves = np.linspace(0.0, max(0.0, math.log2(count / 2.5)), hidden_size // 4)[None]
    phase = np.pi * axis * np.exp2(octaves)
    values = np.random.default_rng(seed).normal(0.0, noise, (count, hidden_size))
    features = np.concatenate([np.sin(phase), np.cos(phase)], 1)
    values[:, : features.shape[1]] += scale * features
    return EmbeddingRows(first, values.astype(np.float32))


def initial_arrays(
    config: ModelConfig, seed: int, *, rows: EmbeddingRows | None = None, std: float = 0.02
) -> dict[str, NDArray[np.float32]]:
    """Random parameters: N(0, std) for matrices, ones for norms, zeros for biases. Same seed, same bits.

    Raises `ParameterMismatchError` when `rows` lie outside the embedding.
    """
    generator = np.random.default_rng(seed)
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith(".bias"):
            arrays[name] = np.zeros(shape, np.float32)
        elif len(shape) == 1:
            arrays[name] = np.ones(shape, np.float32)
        else:
            arrays[name] = generator.standard_normal(shape, np.float32) * np.float32(std)
    if rows is not None:
        end = rows.first + rows.values.shape[0]
        if rows.first < 0 or end > config.vocab_size or rows.values.shape[1:] != (config.hidden_size,):
            raise ParameterMismatchError(
                f"embedding rows {rows.first}..{end} of width {rows.values.shape[1:]} do not fit a vocabulary of "
                f"{config.vocab_size} and a hidden size of {config.hidden_size}"
            )
        arrays["model.embed_tokens.weight"][rows.first : end] = rows.values
    return arrays


def create_folder(folder: Path, config: ModelConfig, seed: int, *, rows: EmbeddingRows | None = None) -> None:
    """Writes a randomly initialised model; the same seed gives the same bytes. Tokenizer files are the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (WEIGHTS_FILE + ".tmp")
    save_file(initial_arrays(config, seed, rows=rows), partial, {"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)
    write_config(folder, config)


def write_config(folder: Path, config: ModelConfig) -> None:
    """Writes config.json atomically (rename)."""
    partial = folder / (CONFIG_FILE + ".tmp")
    partial.write_text(json.dumps(config_to_hf(config), indent=2, sort_keys=True) + "\n")
    partial.replace(folder / CONFIG_FILE)
