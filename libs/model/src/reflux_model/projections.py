"""How a pass multiplies hidden states with the model's matrices: plainly, or as a subclass adds to it."""

import torch.nn.functional as F
from torch import Tensor

from reflux_model.parameters import Parameters


class Projections:
    """The plain products. A pass asks it for every matrix, so that adapters need no layers of their own."""

    def linear(self, params: Parameters, name: str, hidden: Tensor) -> Tensor:
        """hidden (..., in) -> (..., out) with `<name>.weight` and, where it exists, `<name>.bias`."""
        return F.linear(hidden, params[name + ".weight"], params.get(name + ".bias"))

    def head(self, params: Parameters, hidden_TE: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Neighbouring parts of the rows with the matrix (V, width) that turns each into logits."""
        return [(hidden_TE, head_weight(params))]

    def logits(self, params: Parameters, hidden: Tensor) -> Tensor:
        """Normalised hidden states (..., E) -> (..., V)."""
        return F.linear(hidden, head_weight(params))


PLAIN = Projections()


def head_weight(params: Parameters) -> Tensor:
    """The output matrix (V, E): the embedding when the head is tied."""
    head = params.get("lm_head.weight")
    return params["model.embed_tokens.weight"] if head is None else head
