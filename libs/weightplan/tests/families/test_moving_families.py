"""Weights of small models between the layouts of trainers and engines, on numpy, bit for bit; and out of the memory of
Megatron ranks, read by their own rule."""

from collections.abc import Callable

import numpy as np
import pytest
from plan_worlds import explicit_of, fill, regions
from small_models import small

from reflux_weightplan.apply import apply
from reflux_weightplan.families.base import Model
from reflux_weightplan.families.layouts import Parallelism, alone, fsdp, fsdp_experts, parallel
from reflux_weightplan.naming.fused import merge
from reflux_weightplan.naming.megatron import Names
from reflux_weightplan.plan import plan
from reflux_weightplan.spec import SpecLayout

Laid = Callable[[Model], SpecLayout]

SOURCES: dict[str, Laid] = {
    "fsdp": lambda model: fsdp(model, 3),
    "hsdp": lambda model: fsdp(model, 2, copies=2),
    "fsdp-experts": lambda model: fsdp_experts(model, 2, 2),
    "megatron": lambda model: parallel(model, Parallelism(pipeline=2, tensor=2), fused="megatron"),
}
TARGETS: dict[str, Laid] = {
    "alone": alone,
    "tensor-4": lambda model: parallel(model, Parallelism(tensor=4)),
    "experts": lambda model: parallel(model, Parallelism(replicas=2, expert_groups=2, tensor=2)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_weights_arrive_bit_for_bit(source: str, target: str) -> None:
    model = small("qwen3_moe")
    giving, taking = SOURCES[source](model), TARGETS[target](model)
    tensors = fill(giving)
    wanted = regions(explicit_of(taking), tensors)
    out = [np.zeros_like(region) for region in wanted]
    apply(plan(giving, taking), regions(explicit_of(giving), tensors), out)
    assert all((left == right).all() for left, right in zip(out, wanted, strict=True))


def test_the_layout_of_megatron_is_the_memory_of_its_fused_tensors() -> None:
    model = small("llama")
    layout = parallel(model, Parallelism(), fused="megatron")
    tensors = fill(layout)
    (region,) = regions(explicit_of(layout), tensors)
    parts = {spec.name: tensors[spec.name].reshape(spec.shape[0], -1) for spec in layout.tensors}
    for name, members in Names(model).tensors(model.tensors).items():
        fused = merge(parts, members).tobytes()
        assert fused in region.tobytes(), name
