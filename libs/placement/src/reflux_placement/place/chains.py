"""Owns moves in a row: members of one role from cell a to b, and what makes room for them there from b on to c.

Moving j members of r from a to b and i of s from b to c changes the price of pairs by both single changes and, as the
two meet, by  j * i * rate[r, s] * (apart[a, c] - apart[b, c] - apart[a, b]).  With c = a it is an exchange. How many
members of s go follows from what r brings: as many as weigh the same, one unit, or all.
"""

from dataclasses import dataclass

import numpy as np

from reflux_placement.place.cost import Floats
from reflux_placement.topology import Ints

MAX_ENTRIES = 8_000
"""Larger sets of chains are cut to exchanges."""

Chain = tuple[tuple[int, int, int, int], tuple[int, int, int, int]]


@dataclass(frozen=True, eq=False)
class Level:
    """What one level adds to the estimates, prepared once."""

    group_K: Ints
    member_GK: Floats
    apart_KK: Floats
    pull_RR: Floats
    """Rates with the diagonal doubled."""

    rate_RR: Floats
    self_R11: Floats
    price: float
    free_K: Floats
    """Price of the free GPUs of the part of each cell."""


@dataclass(frozen=True, eq=False)
class Scene:
    """The counts that chains start from."""

    levels: list[Level]
    pulls: list[Floats]
    """Per level, P of every role and cell [R, K]."""

    counts_RK: Ints
    left_KC: Ints
    need_RC: Ints
    weight_R: Ints
    unit_R: Ints

    @property
    def num_chains(self) -> int:
        """R * R * K * K * (cells that the third place may be)."""
        num_roles, num_cells = self.counts_RK.shape
        wide = num_roles**2 * num_cells**3
        return wide if wide <= MAX_ENTRIES else num_roles**2 * num_cells**2


def chains(scene: Scene, most: int) -> list[tuple[float, Chain]]:
    """The chains that promise most, none that promises a loss."""
    found: list[tuple[float, Chain]] = []
    unit_RK = np.minimum(scene.unit_R[:, None], scene.counts_RK)
    for mine_RK in (scene.counts_RK, unit_RK):
        for theirs in _sizes(scene, mine_RK):
            found += _ranked(scene, mine_RK, theirs, most)
    return found


def _sizes(scene: Scene, mine_RK: Ints) -> list[Ints]:
    """Members of s at b that go on, for every r, s, a, b: as many as weigh what r brings, and all."""
    weight = mine_RK[:, None, :, None] * scene.weight_R[:, None, None, None]
    unit = scene.unit_R[None, :, None, None]
    there = scene.counts_RK[None, :, None, :]
    equal = -(-weight // (scene.weight_R[None, :, None, None] * unit)) * unit
    return [np.minimum(equal, there), np.broadcast_to(there, equal.shape[:3] + there.shape[3:])]


def _ranked(scene: Scene, mine_RK: Ints, theirs_RSAB: Ints, most: int) -> list[tuple[float, Chain]]:
    num_cells = mine_RK.shape[1]
    cells = np.arange(num_cells)
    wide = scene.num_chains == len(mine_RK) ** 2 * num_cells**3
    third = cells[None, None, None, None, :] if wide else cells[None, None, :, None, None]
    b = cells[None, None, None, :, None]
    a = cells[None, None, :, None, None]
    r, s = np.arange(len(mine_RK))[:, None, None, None, None], np.arange(len(mine_RK))[None, :, None, None, None]
    j, i = mine_RK[:, None, :, None, None], theirs_RSAB[..., None]
    change = np.zeros(np.broadcast_shapes(j.shape, i.shape, third.shape))
    for level, pull_RK in zip(scene.levels, scene.pulls, strict=True):
        apart, own = level.apart_KK, level.self_R11[:, 0, 0]
        change += apart[a, b] * j * (pull_RK[r, b] - pull_RK[r, a] + own[r] * j)
        change += apart[b, third] * i * (pull_RK[s, third] - pull_RK[s, b] + own[s] * i)
        change += level.rate_RR[r, s] * j * i * (apart[a, third] - apart[b, third] - apart[a, b])
    bad = (j == 0) | (i == 0) | (r == s) | (a == b) | (b == third)
    for need_R, left_K in zip(scene.need_RC.T, scene.left_KC.T, strict=True):
        brought, taken = need_R[r] * j, need_R[s] * i
        bad = bad | (brought - taken > left_K[b]) | (taken - np.where(third == a, brought, 0) > left_K[third])
    change[np.broadcast_to(bad, change.shape)] = np.inf
    flat = change.ravel()
    at = np.flatnonzero(flat <= 0)
    at = at[np.argsort(flat[at], kind="stable")[:most]]
    found: list[tuple[float, Chain]] = []
    for entry in at.tolist():
        role, other, begin, middle, last = (int(each) for each in np.unravel_index(entry, change.shape))
        end = last if wide else begin
        size = int(theirs_RSAB[role, other, begin, middle])
        move = ((role, begin, middle, int(mine_RK[role, begin])), (other, middle, end, size))
        found.append((float(flat[entry]), move))
    return found
