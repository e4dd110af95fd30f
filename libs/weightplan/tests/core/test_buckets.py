"""Buckets keep to their bound and to the order of layers."""

import numpy as np
from plan_worlds import deepseek_like

from reflux_weightplan.expand import Expander
from reflux_weightplan.mesh import Mesh
from reflux_weightplan.plan import PlanOptions, plan
from reflux_weightplan.spec import SpecLayout, TensorSpec


def test_buckets_bring_no_rank_more_than_the_bound() -> None:
    bound = 64 << 20
    made = plan(*deepseek_like(layers=6, experts=128), PlanOptions(bucket_bytes=bound))
    expander = Expander(made)
    most = np.zeros(len(made.buckets))
    for rank in (0, 7, 64, 127):
        rows = expander.transfers(rank).rows
        held = np.bincount(rows["bucket"], weights=rows["run_bytes"] * rows["runs"], minlength=len(most))
        most = np.maximum(most, held)
    assert most.max() <= bound
    assert all(bucket.nbytes >= held for bucket, held in zip(made.buckets, most, strict=True))
    assert all(bucket.nbytes <= bound for bucket in made.buckets)
    full = [bucket for bucket in made.buckets if bucket.nbytes > bound / 2]
    assert len(full) > len(made.buckets) / 2, "buckets are filled before the next one is opened"


def test_buckets_follow_the_layers_not_the_list() -> None:
    names = ["head", "2", "0", "1", "embed"]
    layers = [9, 2, 0, 1, -1]
    tensors = tuple(
        TensorSpec(name, (1 << 20,), "float32", layer=layer) for name, layer in zip(names, layers, strict=True)
    )
    layout = SpecLayout(Mesh(()), tensors)
    made = plan(layout, layout, PlanOptions(bucket_bytes=5 << 20, pack_below=0))
    assert [(bucket.first_layer, bucket.last_layer) for bucket in made.buckets] == [(x, x) for x in (-1, 0, 1, 2, 9)]
    moved = [transfer.tensor for transfer in Expander(made).transfers(0)]
    assert moved == ["embed", "0", "1", "2", "head"]
