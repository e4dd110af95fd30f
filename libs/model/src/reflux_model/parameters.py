"""Named tensors that make up a model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.creation import EmbeddingRows, initial_arrays
from reflux_model.errors import ParameterMismatchError
from reflux_model.shapes import parameter_shapes

Parameters = Mapping[str, Tensor]
"""Named tensors; a tied head has no entry of its own."""


def initial_parameters(
    config: ModelConfig, seed: int, *, rows: EmbeddingRows | None = None, std: float = 0.02
) -> dict[str, Tensor]:
    """The arrays of `creation.initial_arrays` as float32 tensors."""
    arrays = initial_arrays(config, seed, rows=rows, std=std)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def check_parameters(params: Parameters, config: ModelConfig) -> None:
    """Raises `ParameterMismatchError` that names the first parameter that is missing, extra or misshapen."""
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if name not in params:
            raise ParameterMismatchError(f"parameter {name} is missing")
        if tuple(params[name].shape) != shape:
            raise ParameterMismatchError(f"parameter {name} has shape {tuple(params[name].shape)}, expected {shape}")
    extra = sorted(set(params) - set(shapes))
    if extra:
        raise ParameterMismatchError(f"parameter {extra[0]} does not belong to this configuration")
