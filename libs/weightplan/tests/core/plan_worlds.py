"""Layouts and memory for the tests of the planner: a DeepSeek-V3-like list, random layouts, filled regions."""

from collections.abc import Iterator, Mapping

import numpy as np
from explicit_layouts import ShardedLayout, sharded
from hypothesis import strategies as st
from numpy.typing import NDArray

from reflux_weightplan.dtypes import ITEM_BYTES
from reflux_weightplan.mesh import REPLICATED, Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

Memory = NDArray[np.uint8]

HIDDEN = 7168
_COLUMN, _ROW, _WHOLE, _EXPERT = "column", "row", "whole", "expert"


def deepseek_like(
    *, layers: int = 61, experts: int = 256, shards: int = 4, replicas: int = 1, copies: int = 1
) -> tuple[SpecLayout, SpecLayout]:
    """Trainers: `copies` x FSDP `shards` x 64 expert ranks. Engines: `replicas` x 128 ranks of expert parallelism, of
    which 8 each share a tensor. Shapes are those of DeepSeek-V3."""
    trained, served = [], []
    dealt = Placement((Cut(0, "shard+owner", "chunk"),))
    cut = {_COLUMN: Placement((Cut(0, "tensor"),)), _ROW: Placement((Cut(1, "tensor"),)), _WHOLE: REPLICATED}
    per_owner, per_engine = experts // 64, experts // 128
    owners = [Placement((Cut(0, "shard", "chunk"),), (("owner", e // per_owner),)) for e in range(experts)]
    engines = [
        Placement((), (("group", e // per_engine // 8), ("tensor", e // per_engine % 8))) for e in range(experts)
    ]
    for name, shape, dtype, kind, expert, layer in _shapes(layers, experts):
        here, there = (owners[expert], engines[expert]) if kind == _EXPERT else (dealt, cut[kind])
        trained.append(TensorSpec(name, shape, dtype, here, layer))
        served.append(TensorSpec(name, shape, dtype, there, layer))
    source = Mesh((("copy", copies), ("shard", shards), ("owner", 64)))
    target = Mesh((("replica", replicas), ("group", 16), ("tensor", 8)))
    return SpecLayout(source, tuple(trained)), SpecLayout(target, tuple(served))


def _shapes(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...], str, str, int, int]]:
    def tensors(prefix: str, layer: int, rows: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator:
        for name, (shape, kind) in rows.items():
            yield f"{prefix}.{name}", shape, "bfloat16", kind, -1, layer

    yield from tensors("model", -1, {"embed": ((129280, HIDDEN), _COLUMN)})
    yield from tensors("model", layers, {"head": ((129280, HIDDEN), _COLUMN), "norm": ((HIDDEN,), _WHOLE)})
    attention = {
        "q_a": ((1536, HIDDEN), _WHOLE), "q_a_norm": ((1536,), _WHOLE), "q_b": ((24576, 1536), _COLUMN),
        "kv_a": ((576, HIDDEN), _WHOLE), "kv_a_norm": ((512,), _WHOLE), "kv_b": ((32768, 512), _COLUMN),
        "o": ((HIDDEN, 16384), _ROW), "norm": ((HIDDEN,), _WHOLE), "post_norm": ((HIDDEN,), _WHOLE),
    }  # fmt: skip
    for layer in range(layers):
        yield from tensors(f"{layer}", layer, attention)
        width, prefix = (18432, "mlp") if layer < 3 else (2048, "shared")
        gated = {"gate": ((width, HIDDEN), _COLUMN), "up": ((width, HIDDEN), _COLUMN), "down": ((HIDDEN, width), _ROW)}
        yield from tensors(f"{layer}.{prefix}", layer, gated)
        if layer >= 3:
            yield f"{layer}.router", (experts, HIDDEN), "bfloat16", _WHOLE, -1, layer
            yield f"{layer}.bias", (experts,), "float32", _WHOLE, -1, layer
            for expert in range(experts):
                for name, (shape, _) in gated.items():
                    yield f"{layer}.experts.{expert}.{name}", shape, "bfloat16", _EXPERT, expert, layer


def bytes_of(rows: NDArray[np.void]) -> int:
    """Bytes that rows of transfers, pieces or fetches stand for."""
    return int((rows["run_bytes"] * rows["runs"]).sum())


def fill(layout: SpecLayout, seed: int = 0) -> dict[str, Memory]:
    """Random bytes for every global tensor: uint8 [*shape, item bytes]."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: rng.integers(1, 256, (*tensor.shape, ITEM_BYTES[tensor.dtype]), dtype=np.uint8)
        for tensor in layout.tensors
    }


def regions(explicit: ShardedLayout, tensors: Mapping[str, Memory]) -> list[Memory]:
    """The regions of all ranks with the tensors' bytes in them, shard by shard."""
    memories = [np.zeros(nbytes, np.uint8) for nbytes in explicit.region_bytes]
    for tensor in explicit.tensors:
        for shard in tensor.shards:
            inside = tuple(slice(*ends) for ends in zip(shard.box.start, shard.box.stop, strict=True))
            part = tensors[tensor.name][inside]
            there = np.lib.stride_tricks.as_strided(
                memories[shard.rank][shard.offset :], part.shape, (*shard.strides, 1)
            )
            there[:] = part
    return memories


def explicit_of(layout: SpecLayout) -> ShardedLayout:
    """The explicit form, checked for exact cover."""
    explicit = sharded(layout)
    explicit.check()
    return explicit


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[SpecLayout, SpecLayout]:
    """Two layouts of the same tensors on random meshes; one tensor lies everywhere, so that no rank is idle."""
    shapes = draw(st.lists(st.lists(st.integers(1, 13), max_size=3).map(tuple), min_size=1, max_size=4))
    dtypes = [draw(st.sampled_from(("bfloat16", "float32", "uint8"))) for _ in shapes]
    named = [(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
    return _random_layout(draw, named), _random_layout(draw, draw(st.permutations(named)))


def _random_layout(draw: st.DrawFn, named: list[tuple[str, tuple[int, ...], str]]) -> SpecLayout:
    mesh = Mesh(tuple((axis, draw(st.integers(1, 3))) for axis in ("a", "b", "c")[: draw(st.integers(0, 3))]))
    tensors = [TensorSpec("everywhere", (5,), "float32")]
    fused = draw(st.booleans())
    for name, shape, dtype in named:
        layer = draw(st.integers(-1, 2))
        tensors.append(TensorSpec(name, shape, dtype, _placement(draw, mesh, shape), layer, "all" if fused else ""))
    if draw(st.booleans()):
        tensors += _interleaved(draw, mesh)
    else:
        tensors += [TensorSpec("q", (16, 3), "bfloat16"), TensorSpec("k", (8, 3), "bfloat16")]
    return SpecLayout(mesh, tuple(tensors))


def _placement(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Placement:
    cuts, pinned = [], []
    joined = len(mesh.axes) > 1 and draw(st.booleans())
    axes = [("+".join(name for name, _ in mesh.axes), 0)] if joined else list(mesh.axes)
    for axis, size in axes:
        what = draw(st.sampled_from(("cut", "cut", "pin", "replicate")))
        if what == "cut" and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            cuts.append(Cut(dim, axis, draw(st.sampled_from(("chunk", "even"))), draw(st.integers(1, 3))))
        elif what == "pin" and size:
            pinned.append((axis, draw(st.integers(0, size - 1))))
    return Placement(tuple(cuts), tuple(pinned))


def _interleaved(draw: st.DrawFn, mesh: Mesh) -> list[TensorSpec]:
    """q and k in four blocks of 4 and 2 rows, cut by whole blocks or not at all."""
    cuts = draw(st.booleans()) and [axis for axis, _ in mesh.axes][:1]
    return [
        TensorSpec(
            name, (4 * rows, 3), "bfloat16", Placement(tuple(Cut(0, axis, "even", rows) for axis in cuts or ())),
            fused="qk", fused_order=order, fused_rows=rows,
        )
        for order, (name, rows) in enumerate((("q", 4), ("k", 2)))
    ]  # fmt: skip
