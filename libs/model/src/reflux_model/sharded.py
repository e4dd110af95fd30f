"""The model as a module whose parameters FSDP2 spreads over ranks. Names and arithmetic are those of `training`.

Every rank holds a slice of dimension 0 of every parameter, as torch.chunk cuts it. A block's parameters are gathered
when it runs and dropped behind it; gradients are summed, not averaged: token weights are those of the whole batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from reflux_model.config import ModelConfig
from reflux_model.layers import embed, rms_norm, rotary_tables, run_block
from reflux_model.packing import PackedRows
from reflux_model.scoring import chunked_scores
from reflux_model.training import tree_attention

_LAYER = "model.layers."


class ShardedModel(nn.Module):
    """Root of the module tree; blocks are modules of their own. `forward` is the whole scoring pass."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config.num_layers))
        self.ends = nn.Module()
        for name, tensor in params.items():
            if name.startswith(_LAYER):
                layer, _, rest = name.removeprefix(_LAYER).partition(".")
                _register(self.blocks[int(layer)], rest, tensor)
            else:
                _register(self.ends, name, tensor)

    def forward(self, packed: PackedRows, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all predicted tokens."""
        ends = dict(self.ends.named_parameters())
        dtype = ends["model.embed_tokens.weight"].dtype
        attention = tree_attention(packed, dtype)
        rope = rotary_tables(self.config, packed.positions_RS, dtype)
        hidden = embed(ends, packed.tokens_RS)
        for block in self.blocks:
            run: Callable[[Tensor], Tensor] = partial(block, rope=rope, attention=attention)
            hidden = checkpoint(run, hidden, use_reentrant=False) if recompute else run(hidden)
        hidden = rms_norm(hidden, ends["model.norm.weight"], self.config.rms_norm_eps)
        head = ends.get("lm_head.weight", ends["model.embed_tokens.weight"])
        scores = chunked_scores(hidden.flatten(0, 1)[packed.sources_T], head, packed.targets_T)
        return scores.logprobs_T, scores.entropies_T


class _Block(nn.Module):
    """One transformer block; FSDP2 gathers what it owns around `forward`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer

    def forward(self, hidden: Tensor, **others: Any) -> Tensor:
        """As `layers.run_block`."""
        prefix = f"{_LAYER}{self.layer}."
        params = {prefix + name: parameter for name, parameter in self.named_parameters()}
        return run_block(params, self.config, self.layer, hidden, **others)


def shard(model: ShardedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Spreads the parameters over the mesh, in place; every rank has the same values before.

    They are gathered in the type of the passes and summed as float32. The root gives its parameters back behind the
    forward pass too: one without gradients would otherwise leave them gathered, and stale after the next step.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that a factor asks for otherwise


def local_shards(model: ShardedModel) -> dict[str, Tensor]:
    """This rank's slice of every parameter by Hugging Face name; views that steps change."""
    return {name: cast(DTensor, parameter).to_local() for name, parameter in _named(model).items()}


def local_gradients(model: ShardedModel) -> dict[str, Tensor]:
    """This rank's slice of every gradient that there is."""
    named = _named(model).items()
    return {name: cast(DTensor, each.grad).to_local() for name, each in named if each.grad is not None}


def set_local_gradients(model: ShardedModel, gradients: Mapping[str, Tensor]) -> None:
    """Puts slices of gradients in their place, for a backward pass to add to."""
    for name, parameter in _named(model).items():
        if name in gradients:
            whole = cast(DTensor, parameter)
            parameter.grad = DTensor.from_local(
                gradients[name], whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
            )


def _named(model: ShardedModel) -> dict[str, nn.Parameter]:
    named = {}
    for name, parameter in model.named_parameters():
        kind, _, rest = name.partition(".")
        named[rest if kind == "ends" else _LAYER + rest] = parameter
    return named


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    """A parameter under a dotted name, with modules in between that only hold it."""
    *path, last = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = cast(nn.Module, getattr(root, step))
    root.register_parameter(last, nn.Parameter(tensor.detach().clone()))
