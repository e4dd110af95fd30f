"""The model of the benchmarks, for those ways that move tensors."""

from pathlib import Path

import torch

from reflux_model.folder import load_folder


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """Its parameters in bfloat16."""
    torch.set_num_threads(1)
    return load_folder(Path(folder), dtype=torch.bfloat16)[1]
