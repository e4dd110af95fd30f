"""Owns the factorisation: tensors that move in the same way form one class with one template."""

from dataclasses import dataclass

import numpy as np

from reflux_weightplan.boxes import Box
from reflux_weightplan.errors import PlanRefused
from reflux_weightplan.sides import Ints, Side
from reflux_weightplan.templates import Template, make_template


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one source kind and one target kind; `tensors` index the target's list, `sources` the source's.

    Both are in the order of the transfer: by layer, then by position in the target's list.
    """

    source_kind: int
    target_kind: int
    template: Template
    tensors: Ints
    sources: Ints


@dataclass(frozen=True)
class Joined:
    """Classes of a pair of layouts; `class_T` names the class of every target tensor, `order_T` is the transfer's order
    of target tensors."""

    classes: tuple[TensorClass, ...]
    class_T: Ints
    order_T: Ints


def join(source: Side, target: Side, pack_below: int, max_runs: int) -> Joined:
    """Finds the source tensor of every target tensor; raises `PlanRefused` for absent names and other shapes or types.

    Source tensors that the target does not know are left out.
    """
    source_T = _matched(source, target)
    kinds = int(target.kind_T.max()) + 1
    codes, class_T = np.unique(source.kind_T[source_T] * kinds + target.kind_T, return_inverse=True)
    class_T = class_T.reshape(-1)
    order_T = np.argsort([tensor.layer for tensor in target.layout.tensors], kind="stable")
    members = order_T[np.argsort(class_T[order_T], kind="stable")]
    ends = np.searchsorted(class_T[members], np.arange(len(codes) + 1))
    templates: dict[tuple[int, int], Template] = {}
    classes = []
    for index, code in enumerate(codes.tolist()):
        source_kind, target_kind = divmod(code, kinds)
        forms = source.form_K[source_kind], target.form_K[target_kind]
        if forms not in templates:
            templates[forms] = make_template(source.forms[forms[0]], target.forms[forms[1]], pack_below, max_runs)
        tensors = members[ends[index] : ends[index + 1]]
        classes.append(TensorClass(source_kind, target_kind, templates[forms], tensors, source_T[tensors]))
    return Joined(tuple(classes), class_T, order_T)


def _matched(source: Side, target: Side) -> Ints:
    positions = {tensor.name: index for index, tensor in enumerate(source.layout.tensors)}
    found = np.array([positions.get(tensor.name, -1) for tensor in target.layout.tensors])
    absent = [target.layout.tensors[index] for index in np.flatnonzero(found < 0).tolist()]
    if absent:
        missing = [(tensor.name, Box.whole(tensor.shape)) for tensor in absent]
        raise PlanRefused(f"the source lacks {len(absent)} tensors of the target", missing=missing)
    differing = [
        f"{wanted.name} is {held.dtype}{list(held.shape)} here, {wanted.dtype}{list(wanted.shape)} there"
        for wanted, held in zip(target.layout.tensors, (source.layout.tensors[i] for i in found.tolist()), strict=True)
        if (wanted.shape, wanted.dtype) != (held.shape, held.dtype)
    ]
    if differing:
        raise PlanRefused(
            f"{len(differing)} tensors differ between source (here) and target (there): " + "; ".join(differing[:8])
        )
    return found
