"""Low-rank adapters: y = W x + scale * B A x, scale = alpha / rank. LoRA, arXiv 2106.09685.

A starts random and B at zero, so that a fresh adapter changes nothing. Factors are named after their matrix, as PEFT
names them: `<module>.lora_A.weight` (rank, in) and `<module>.lora_B.weight` (out, rank).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from reflux_model.config import ModelConfig
from reflux_model.errors import UnsupportedModelError
from reflux_model.packing import pack_rows
from reflux_model.parameters import Parameters
from reflux_model.projections import PLAIN, Projections, head_weight
from reflux_model.shapes import LORA_ALPHA, parameter_shapes
from reflux_model.training import packed_scores

TargetGroup = Literal["attention", "mlp", "unembed"]
TARGET_GROUPS: tuple[TargetGroup, ...] = get_args(TargetGroup)
_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """What an adapter adapts, and with how many ranks."""

    rank: int
    groups: tuple[TargetGroup, ...]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UnsupportedModelError(f"the rank of an adapter must be at least 1, got {self.rank}")
        if not self.groups:
            raise UnsupportedModelError(f"an adapter needs a target: one or more of {', '.join(TARGET_GROUPS)}")

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return LORA_ALPHA / self.rank


def target_shapes(config: ModelConfig, groups: Sequence[TargetGroup]) -> dict[str, tuple[int, int]]:
    """Adapted modules with the (out, in) of their matrices. Raises `UnsupportedModelError` for an absent target."""
    if "unembed" in groups and config.tie_embeddings:
        raise UnsupportedModelError(
            "an adapter cannot train 'unembed' here: the model ties its output head to the embedding, so that there is "
            "no lm_head.weight; leave the target out or untie the model folder"
        )
    chosen: dict[str, tuple[int, int]] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 2 and _group(name) in groups:
            chosen[name.removesuffix(".weight")] = (shape[0], shape[1])
    return chosen


def factor_shapes(config: ModelConfig, spec: LoraSpec) -> dict[str, tuple[int, int]]:
    """Names and shapes of all factors."""
    shapes: dict[str, tuple[int, int]] = {}
    for module, (rows, columns) in target_shapes(config, spec.groups).items():
        name_a, name_b = factor_names(module)
        shapes |= {name_a: (spec.rank, columns), name_b: (rows, spec.rank)}
    return shapes


def initial_factors(config: ModelConfig, spec: LoraSpec, seed: int) -> dict[str, Tensor]:
    """A from U(-1/sqrt(in), 1/sqrt(in)), B of zeros. The same seed gives the same bits, whatever else exists."""
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for name, shape in factor_shapes(config, spec).items():
        factors[name] = torch.zeros(shape)
        if name.endswith(".lora_A.weight"):
            bound = 1.0 / math.sqrt(shape[1])
            factors[name].uniform_(-bound, bound, generator=generator)
    return factors


def factor_names(module: str) -> tuple[str, str]:
    """Names of A and B of a module."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


@torch.no_grad()
def merged(params: Parameters, factors: Parameters, spec: LoraSpec) -> dict[str, Tensor]:
    """The parameters with W + scale * B A for every adapted matrix; all others are those handed in."""
    whole = {name: tensor.detach() for name, tensor in params.items()}
    for name, weight in whole.items():
        name_a, name_b = factor_names(name.removesuffix(".weight"))
        if name_b in factors:
            whole[name] = torch.addmm(weight, factors[name_b], factors[name_a], alpha=spec.scale)
    return whole


@dataclass(frozen=True)
class AdaptedRows:
    """Neighbouring rows of a pass that one adapter answers for, and the tokens that are predicted there."""

    rows: slice
    tokens: slice
    factors: Parameters
    spec: LoraSpec


class LoraProjections(Projections):
    """Several adapters in one pass: each adds to its own rows; together they cover all rows, in order."""

    def __init__(self, parts: Sequence[AdaptedRows]) -> None:
        self._parts = parts

    def linear(self, params: Parameters, name: str, hidden: Tensor) -> Tensor:
        """The base's product for all rows, and each adapter's for its own."""
        plain = super().linear(params, name, hidden)
        added = [self._added(part, name, hidden[part.rows], plain[part.rows]) for part in self._parts]
        return added[0] if len(added) == 1 else torch.cat(added)

    def head(self, params: Parameters, hidden_TE: Tensor) -> list[tuple[Tensor, Tensor]]:
        """An adapted head is one wider matrix: [W | B] times [x, scale * A x]."""
        parts = []
        for part in self._parts:
            hidden, weight = hidden_TE[part.tokens], head_weight(params)
            name_a, name_b = factor_names(_HEAD)
            if name_a in part.factors:
                hidden = torch.cat([hidden, F.linear(hidden, part.factors[name_a]) * part.spec.scale], -1)
                weight = torch.cat([weight, part.factors[name_b]], 1)
            parts.append((hidden, weight))
        return parts

    def _added(self, part: AdaptedRows, name: str, hidden: Tensor, plain: Tensor) -> Tensor:
        name_a, name_b = factor_names(name)
        if name_a not in part.factors:
            return plain
        return plain + F.linear(F.linear(hidden, part.factors[name_a]), part.factors[name_b]) * part.spec.scale


@torch.no_grad()
def scored(
    params: Parameters, config: ModelConfig, token_ids: Sequence[int], adapter: tuple[Parameters, LoraSpec] | None
) -> Tensor:
    """Log-prob of every token after the first, with an adapter on the model or without."""
    packed = pack_rows([token_ids[:1]], [[token_ids[1:]]])
    whole = slice(0, None)
    projections = LoraProjections([AdaptedRows(whole, whole, *adapter)]) if adapter else PLAIN
    return packed_scores(params, config, packed, projections=projections).logprobs_T


@dataclass(frozen=True)
class RoutedRows:
    """Rows of an engine's pass that one adapter answers for: any distinct ones (int64), or a slice."""

    rows: slice | Tensor
    factors: Parameters
    spec: LoraSpec


class RoutedLora(Projections):
    """Several adapters in one pass without gradients: each adds to the rows that it names, others are the base's.

    Rows are those of all dimensions but the last, flat.
    """

    def __init__(self, parts: Sequence[RoutedRows]) -> None:
        self._parts = parts

    def linear(self, params: Parameters, name: str, hidden: Tensor) -> Tensor:
        """The base's product for all rows, and each adapter's added for its own."""
        return self._add(name, hidden, super().linear(params, name, hidden))

    def logits(self, params: Parameters, hidden: Tensor) -> Tensor:
        """Likewise, of the head."""
        return self._add(_HEAD, hidden, super().logits(params, hidden))

    def _add(self, name: str, hidden: Tensor, product: Tensor) -> Tensor:
        name_a, name_b = factor_names(name)
        from_NE, into_NE = hidden.reshape(-1, hidden.shape[-1]), product.view(-1, product.shape[-1])
        for part in self._parts:
            if name_a in part.factors:
                low_NR = F.linear(from_NE[part.rows], part.factors[name_a])
                into_NE[part.rows] += F.linear(low_NR, part.factors[name_b]) * part.spec.scale
        return product


def _group(name: str) -> str:
    """The target group of a matrix; empty for those that no adapter changes."""
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "unembed" if name.startswith(_HEAD + ".") else ""
