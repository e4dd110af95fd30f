"""How passes are computed: in which type, and what their backward half finds. Weights and moments are float32."""

from dataclasses import dataclass

import torch

from reflux_model.parameters import Parameters

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Choices of a model that no result depends on but for rounding."""

    dtype: torch.dtype = torch.float32
    """Type of the products; norms and log-probs are float32."""
    recompute: bool = False
    """Whether activations are computed again instead of kept (gradient checkpointing)."""
    deterministic: bool = False
    """Whether log-probs have the bits of an engine that decodes one sequence at a time; gradients are as without."""

    def cast(self, params: Parameters) -> Parameters:
        """Parameters as passes take them; gradients reach the originals in float32."""
        if self.dtype == torch.float32:
            return params
        return {name: tensor.to(self.dtype) for name, tensor in params.items()}


FLOAT32 = Numerics()
