"""How trainers and engines lay a model over ranks: alone, FSDP2, FSDP2 with experts, and tensor, pipeline and expert
parallelism as Megatron-Core, vLLM and SGLang use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reflux_weightplan.errors import LayoutRefused
from reflux_weightplan.families.base import Model, ModelTensor
from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

Fusing = Literal["apart", "engine", "megatron"]
"""How q, k, v and gate, up lie in memory: each by itself (Hugging Face), behind each other in one local tensor (vLLM,
SGLang), or q, k and v interleaved by key-value group (Megatron-Core)."""

ENGINE_PADDING, MEGATRON_PADDING = 64, 128
"""vLLM and SGLang pad the vocabulary to a multiple of 64 (SGLang to 64 x ranks when that does not divide),
Megatron-Core to one of 128 x ranks; then every rank has equally many rows. Padding is never sent."""


@dataclass(frozen=True)
class Parallelism:
    """Sizes of a tensor-parallel group of replicas, outermost first. With `expert_groups` above 0 every replica has
    `expert_groups` x `tensor` ranks, which share out the experts whole; the rest is repeated in each group."""

    replicas: int = 1
    pipeline: int = 1
    expert_groups: int = 0
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of all replicas."""
        return self.replicas * self.pipeline * max(1, self.expert_groups) * self.tensor


def alone(model: Model, *, engine: str = "torch", places: Sequence[Place] = ()) -> SpecLayout:
    """One rank that holds all."""
    return _layout(model, Mesh(()), lambda _tensor: Placement(), engine, places)


def fsdp(model: Model, shards: int, *, copies: int = 1, places: Sequence[Place] = ()) -> SpecLayout:
    """FSDP2: every tensor cut along dimension 0 by torch.chunk; `copies` above 1 is HSDP."""
    mesh = Mesh((("copy", copies), ("shard", shards)))
    return _layout(model, mesh, lambda _tensor: Placement((Cut(0, "shard", "chunk"),)), "fsdp2", places)


def fsdp_experts(model: Model, shards: int, owners: int, *, places: Sequence[Place] = ()) -> SpecLayout:
    """FSDP2 over `shards` x `owners` ranks; routed experts lie whole with their owner and are cut over its shards.

    Raises LayoutRefused when the experts do not divide among the owners.
    """
    if not model.experts or model.experts % owners:
        raise LayoutRefused(f"{model.experts} experts do not divide among {owners} owners")

    def placement(tensor: ModelTensor) -> Placement:
        if tensor.expert < 0:
            return Placement((Cut(0, "shard+owner", "chunk"),))
        owner = tensor.expert * owners // model.experts
        return Placement((Cut(0, "shard", "chunk"),), (("owner", owner),))

    return _layout(model, Mesh((("shard", shards), ("owner", owners))), placement, "fsdp2", places)


def parallel(
    model: Model, sizes: Parallelism, *, engine: str = "vllm", fused: Fusing = "engine", places: Sequence[Place] = ()
) -> SpecLayout:
    """Tensor, pipeline and expert parallelism. Heads of fewer keys and values than ranks are repeated over neighbours.

    Args:
        model: shapes.
        sizes: sizes of the mesh.
        engine: a name for people.
        fused: how neighbours share local tensors.
        places: one per rank.

    Raises:
        LayoutRefused: layers or experts do not divide.
    """
    if model.layers < sizes.pipeline:
        raise LayoutRefused(f"{model.layers} layers are too few for {sizes.pipeline} pipeline stages")
    owners = sizes.expert_groups * sizes.tensor
    if owners and (not model.experts or model.experts % owners):
        raise LayoutRefused(f"{model.experts} experts do not divide among {owners} ranks of a replica")
    mesh = Mesh(
        (
            ("replica", sizes.replicas),
            ("stage", sizes.pipeline),
            ("group", max(1, sizes.expert_groups)),
            ("tensor", sizes.tensor),
        )
    )
    tied = all(tensor.name != "lm_head.weight" for tensor in model.tensors)

    def placement(tensor: ModelTensor) -> Placement:
        pinned = _stage(model, tensor, sizes.pipeline, tied=tied)
        if tensor.expert >= 0 and owners:
            group, rank = divmod(tensor.expert * owners // model.experts, sizes.tensor)
            return Placement((), (*pinned, ("group", group), ("tensor", rank)))
        return Placement(_cuts(tensor, sizes.tensor, fused), pinned)

    return _layout(model, mesh, placement, engine, places, fused=fused)


def _stage(model: Model, tensor: ModelTensor, stages: int, *, tied: bool) -> tuple[tuple[str, int], ...]:
    if tensor.part == "vocabulary" and tied:
        return ()  # The last stage computes logits with the table of the first.
    layer = min(max(tensor.layer, 0), model.layers - 1)
    return (("stage", layer * stages // model.layers),)


def _cuts(tensor: ModelTensor, ranks: int, fused: Fusing) -> tuple[Cut, ...]:
    match tensor.part:
        case "vocabulary":
            return (Cut(0, "tensor", "chunk", _vocabulary_rows(tensor.shape[0], ranks, fused)),)
        case "query" | "key" | "value" | "column":
            if fused != "megatron" or not tensor.group_rows:
                return (Cut(0, "tensor", "even", tensor.head),)
            if tensor.shape[0] // tensor.group_rows % ranks:
                raise LayoutRefused(f"{tensor.name}: its key-value groups do not divide among {ranks} Megatron ranks")
            return (Cut(0, "tensor", "even", tensor.group_rows),)
        case "row":
            return (Cut(1, "tensor", "even", tensor.head),)
        case "replicated":
            return ()


def _vocabulary_rows(size: int, ranks: int, fused: Fusing) -> int:
    """Rows of the padded vocabulary per rank."""
    multiple = MEGATRON_PADDING * ranks if fused == "megatron" else ENGINE_PADDING
    if -(-size // multiple) * multiple % ranks:
        multiple = ENGINE_PADDING * ranks
    return -(-size // multiple) * multiple // ranks


def _layout(
    model: Model,
    mesh: Mesh,
    placement: Callable[[ModelTensor], Placement],
    engine: str,
    places: Sequence[Place],
    *,
    fused: Fusing = "apart",
) -> SpecLayout:
    specs: list[TensorSpec] = []
    for tensor in model.tensors:
        spec = TensorSpec(tensor.name, tensor.shape, tensor.dtype, placement(tensor), tensor.layer)
        if fused != "apart" and tensor.fused:
            rows = tensor.group_rows if fused == "megatron" else 0
            spec = replace(spec, fused=tensor.fused, fused_order=tensor.fused_order, fused_rows=rows)
        specs.append(spec)
    return SpecLayout(mesh, tuple(specs), tuple(places), engine)
