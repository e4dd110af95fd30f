"""Owns the choice of sources: which of the ranks that hold the same bytes serves which target rank.

The choice is made per *group*, the set of ranks that hold a box in common, and target rank: never per box. Largest
demands go first, each to the candidate whose port is free earliest (longest processing time first, Graham 1969). A
nearer candidate is favoured: bytes through the spine count a quarter more than those inside a rack, and a candidate on
the target's own host or in its NVLink domain is always taken, because it needs no port.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.boxes import Box
from reflux_weightplan.classes import TensorClass
from reflux_weightplan.errors import PlanRefused
from reflux_weightplan.links import SAME_DOMAIN, SPINE, Ports
from reflux_weightplan.sides import NOWHERE, Ints, Side

SPINE_PENALTY = 0.25
SMALL_PAIRS = 4096
"""Below so many (source, target) pairs the tensors of a class are dealt to several groups, so that loads even out."""

SMALL_PARTS = 8


@dataclass(frozen=True)
class Groups:
    """`ranks` are the members of each group. `of_class` int64 [parts, U] by class: the group of every source box."""

    ranks: tuple[Ints, ...]
    of_class: tuple[Ints, ...]
    parts: int

    def part_of(self, tensors: int) -> Ints:
        """Part of the tensors of a class, by their position in it."""
        return np.arange(tensors) % self.parts


def group_sources(classes: Sequence[TensorClass], source: Side, target: Side, lost: frozenset[int]) -> Groups:
    """Who can serve every box. Raises `PlanRefused` with the ranges that only `lost` ranks hold, or nobody."""
    members_K = {kind: _members(source, kind, lost) for kind in {each.source_kind for each in classes}}
    several = any(len(members) > 1 for boxes in members_K.values() for members in boxes)
    parts = SMALL_PARTS if several and source.ranks * target.ranks < SMALL_PAIRS else 1
    missing: list[tuple[str, Box]] = []
    for each in classes:
        missing += _missing(each, members_K[each.source_kind], target)
    if missing:
        raise PlanRefused(f"{len(missing)} ranges have no source", missing=missing)
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    of_kind = {
        kind: np.array(
            [
                [numbers.setdefault((part, members), len(numbers)) if members else NOWHERE for members in boxes]
                for part in range(parts)
            ]
        )
        for kind, boxes in members_K.items()
    }
    ranks = tuple(np.array(members) for _, members in numbers)
    return Groups(ranks, tuple(of_kind[each.source_kind] for each in classes), parts)


def _members(source: Side, kind: int, lost: frozenset[int]) -> list[tuple[int, ...]]:
    members: list[list[int]] = [[] for _ in source.form_of_kind(kind).boxes]
    for rank, box in enumerate(source.box_KR[kind].tolist()):
        if box >= 0 and rank not in lost:
            members[box].append(rank)
    return [tuple(ranks) for ranks in members]


def _missing(each: TensorClass, members: list[tuple[int, ...]], target: Side) -> list[tuple[str, Box]]:
    template = each.template
    wanted = np.zeros(len(target.form_of_kind(each.target_kind).boxes), bool)
    wanted[target.box_KR[each.target_kind][target.box_KR[each.target_kind] >= 0]] = True
    absent = np.array([not ranks for ranks in members])
    if not absent.any():
        return []
    pieces = np.flatnonzero(absent[template.source_box] & wanted[template.target_box])
    boxes = [Box(tuple(template.low[p].tolist()), tuple(template.high[p].tolist())) for p in pieces.tolist()]
    names = [target.layout.tensors[tensor].name for tensor in each.tensors.tolist()]
    return [(name, box) for name in names for box in dict.fromkeys(boxes)]


def choose(
    seconds_GD: NDArray[np.float64],
    groups: Groups,
    tier_SD: NDArray[np.int8],
    ports: Ports,
    background_S: NDArray[np.float64],
) -> Ints:
    """The source rank of every group for every target rank, int64 [G, D]; `background_S` are seconds that a source's
    port owes already."""
    load = np.zeros(len(ports.rates))
    np.add.at(load, ports.port_R, background_S)
    choice = np.full(seconds_GD.shape, NOWHERE)
    open_groups = []
    for group, ranks in enumerate(groups.ranks):
        if len(ranks) == 1:
            choice[group] = ranks[0]
            load[ports.port_R[ranks[0]]] += seconds_GD[group][tier_SD[ranks[0]] > SAME_DOMAIN].sum()
        else:
            choice[group] = ranks[0]
            open_groups.append(group)
    if open_groups:
        _choose_open(seconds_GD, groups, tier_SD, ports.port_R, load, choice, np.array(open_groups))
    return choice


def _choose_open(
    seconds_GD: NDArray[np.float64],
    groups: Groups,
    tier_SD: NDArray[np.int8],
    port_S: Ints,
    load: NDArray[np.float64],
    choice: Ints,
    open_groups: Ints,
) -> None:
    """Longest demand first; changes `load` and `choice`."""
    rows, columns = np.nonzero(seconds_GD[open_groups] > 0)
    seconds = seconds_GD[open_groups][rows, columns]
    order = np.argsort(-seconds, kind="stable")
    for group, target, wanted in zip(
        open_groups[rows[order]].tolist(), columns[order].tolist(), seconds[order].tolist(), strict=True
    ):
        ranks = groups.ranks[group]
        tier = tier_SD[ranks, target]
        near = int(tier.argmin())
        if tier[near] <= SAME_DOMAIN:
            choice[group, target] = ranks[near]
            continue
        score = load[port_S[ranks]] + np.where(tier == SPINE, wanted * SPINE_PENALTY, 0.0)
        best = ranks[int(score.argmin())]
        choice[group, target] = best
        load[port_S[best]] += wanted
