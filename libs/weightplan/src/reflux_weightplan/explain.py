"""Owns what people read about a plan: its size, its route, and how near it comes to the bound."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reflux_weightplan.links import TIER_NAMES, tiers
from reflux_weightplan.plan import Plan, Route, make_network


@dataclass(frozen=True)
class Explanation:
    """Figures of a plan. `boxes` are pieces of boxes over all ranks; `pairs` are (source, target) ranks that talk."""

    hash: str
    source_hash: str
    target_hash: str
    route: Route
    source_ranks: int
    target_ranks: int
    tensors: int
    classes: int
    templates: int
    boxes: int
    nbytes: int
    packed_bytes: int
    pairs: int
    messages: int
    buckets: int
    bucket_bytes: int
    lower_bound_seconds: float
    makespan_seconds: float
    efficiency: float
    source_bytes: tuple[int, int]
    target_bytes: tuple[int, int]
    tier_bytes: dict[str, int]

    def lines(self) -> list[str]:
        """The figures as text, one fact a line."""
        gib = 1 / (1 << 30)
        route = self.route if self.route == "direct" else f"{self.route} (a model: publishers and replicas go direct)"
        near = ", ".join(f"{name} {count * gib:.2f} GiB" for name, count in self.tier_bytes.items() if count)
        return [
            f"plan        {self.hash}",
            f"layouts     {self.source_hash} on {self.source_ranks} ranks -> {self.target_hash} on {self.target_ranks}",
            f"tensors     {self.tensors} in {self.classes} classes, {self.templates} templates, {self.boxes} boxes",
            f"bytes       {self.nbytes * gib:.2f} GiB, packed {self.packed_bytes / max(self.nbytes, 1):.1%}; {near}",
            f"per source  {self.source_bytes[0] * gib:.2f} to {self.source_bytes[1] * gib:.2f} GiB when sent directly",
            f"per target  {self.target_bytes[0] * gib:.2f} to {self.target_bytes[1] * gib:.2f} GiB",
            f"messages    {self.messages} between {self.pairs} pairs when sent directly",
            f"buckets     {self.buckets}, at most {self.bucket_bytes / (1 << 20):.0f} MiB per target rank",
            f"route       {route}",
            f"makespan    {self.makespan_seconds:.4g} s, lower bound {self.lower_bound_seconds:.4g} s, "
            f"efficiency {self.efficiency:.3f}",
        ]

    def json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


def explain(plan: Plan) -> Explanation:
    """Counts a plan's figures, without listing its transfers."""
    source, target = plan.source.layout, plan.target.layout
    network = make_network(source, target, plan.options.link)
    tier_SD = tiers(network.source_places, network.target_places)
    boxes, packed = 0, 0
    for each in plan.classes:
        box_D = plan.target.box_KR[each.target_kind]
        copies = np.bincount(box_D[box_D >= 0], minlength=int(each.template.target_box.max(initial=0)) + 1)
        wanted = copies[each.template.target_box]
        boxes += int(wanted.sum()) * len(each.tensors)
        packed += int((wanted * each.template.nbytes * each.template.packed).sum()) * len(each.tensors)
    out, into = plan.traffic.sum(axis=1), plan.traffic.sum(axis=0)
    return Explanation(
        hash=plan.hash, source_hash=plan.source_hash, target_hash=plan.target_hash, route=plan.route,
        source_ranks=plan.source.ranks, target_ranks=plan.target.ranks, tensors=len(target.tensors),
        classes=len(plan.classes), templates=len({id(each.template) for each in plan.classes}), boxes=boxes,
        nbytes=int(plan.traffic.sum()), packed_bytes=packed, pairs=int((plan.traffic > 0).sum()),
        messages=int(plan.messages.sum()), buckets=len(plan.buckets),
        bucket_bytes=max(bucket.nbytes for bucket in plan.buckets), lower_bound_seconds=plan.lower_bound_seconds,
        makespan_seconds=plan.makespan_seconds, efficiency=plan.efficiency,
        source_bytes=(int(out.min()), int(out.max())), target_bytes=(int(into.min()), int(into.max())),
        tier_bytes={name: int(plan.traffic[tier_SD == tier].sum()) for tier, name in enumerate(TIER_NAMES)},
    )  # fmt: skip
