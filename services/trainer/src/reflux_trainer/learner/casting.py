"""Writes weights in the type in which they are published, straight into their place without a copy in between."""

import torch
from torch import Tensor

from reflux_transfer.arenas.staging import Cast


def caster(dtype: torch.dtype) -> Cast:
    """Rounds to nearest even where `dtype` is narrower than the tensor's. The interpreter is free meanwhile."""

    def cast(part: Tensor, place: memoryview) -> None:
        torch.frombuffer(place, dtype=dtype).copy_(part)

    return cast
