"""Owns the moves of the local search and an estimate of what each saves, all of them at once as arrays.

Moving j members of role r from cell a to cell b changes the pairs that are together at a level, where a and b lie in
different parts, by  j * (P[r, b] - P[r, a]) + 2 * rate[r, r] * j^2  with  P = (rate + its diagonal) @ N  for the
members N of all roles per part. Two moves at once add  -2 * j * i * rate[r, s].  Touched parts count for single moves.
"""

import numpy as np

from reflux_placement.place.cells import Counts
from reflux_placement.place.chains import Level, Scene, chains
from reflux_placement.place.cost import Floats
from reflux_placement.place.yard import Yard
from reflux_placement.topology import Ints

Move = tuple[tuple[int, int, int, int], ...]
"""(role, from cell, to cell, members), all at once."""

EXCHANGED = ((0, 0), (0, 2), (2, 0), (2, 2), (2, 3))
"""Which sizes are exchanged for each other: 0 all, 2 a unit, 3 as many as one large member weighs."""

PAIRS_PER_STEP = 150
"""Estimating this many exchanges takes about as long as pricing counts once."""

Ranked = list[tuple[float, Move]]


class Moves:
    """Single moves, exchanges, and moves of bound roles in one yard."""

    def __init__(self, yard: Yard, bound: list[dict[int, int]], most: int) -> None:
        self._unit_R1 = np.array([yard.unit(plan) for plan in yard.plans])[:, None]
        gpus_R = np.maximum([plan.demand.each.gpus for plan in yard.plans], 1)
        equal_R = gpus_R.max() // gpus_R
        # Nothing to add where that is one unit, and whole segments move on their own.
        self._equal_R1 = np.where((equal_R > 1) & (self._unit_R1[:, 0] == 1), equal_R, 1 << 30)[:, None]
        self._bound, self._most = bound, most
        self._levels = [
            Level(
                group_K,
                (np.arange(group_K.max() + 1)[:, None] == group_K).astype(np.float64),
                (group_K[:, None] != group_K).astype(np.float64),
                rate_RR + np.diag(np.diag(rate_RR)),
                rate_RR,
                2 * np.diag(rate_RR)[:, None, None],
                price,
                free_G[group_K] * price,
            )
            for group_K, rate_RR, price, free_G in yard.rates
        ]
        need_RC, free_KC = yard.room()
        columns = need_RC.any(axis=0)
        self._need_RC, self._free_KC = need_RC[:, columns], free_KC[:, columns]
        self.work = 0.0
        """Steps spent on ranking so far."""

        self._weight_R = np.maximum([plan.demand.each.gpus for plan in yard.plans], 1)
        self._known: dict[Counts, list[Move]] = {}
        self._known_chains: dict[Counts, list[Move]] = {}

    def ranked(self, counts: Counts) -> list[Move]:
        """The moves that promise most, best first; those that promise a loss are left out."""
        known = self._known.get(counts)
        if known is not None:
            return known
        counts_RK = np.array(counts, dtype=np.int64)
        self.work += counts_RK.size**2 / PAIRS_PER_STEP
        pulls = [(level.pull_RR @ (counts_RK @ level.member_GK.T))[:, level.group_K] for level in self._levels]
        # Members to move per role and cell: all, half in whole units, one unit, as many as one large member weighs.
        half_RK = counts_RK // 2 // self._unit_R1 * self._unit_R1
        equal_RK = np.where(counts_RK > self._equal_R1, self._equal_R1, 0)
        sizes = [counts_RK, half_RK, np.minimum(self._unit_R1, counts_RK), equal_RK]
        changes = [self._change(size_RK, pulls) for size_RK in sizes]
        left_KC = self._free_KC - counts_RK.T @ self._need_RC
        found: Ranked = []
        for size_RK, change in zip(sizes, changes, strict=True):
            found += self._singles(counts_RK, size_RK, change, left_KC)
        for one, other in EXCHANGED:
            found += self._exchanges((sizes[one], changes[one]), (sizes[other], changes[other]), left_KC)
        found += self._gathers(counts_RK)
        found += self._bound_moves(counts_RK, pulls)
        found.sort(key=lambda each: each[0])
        best = list(dict.fromkeys(move for _, move in found))[: self._most]
        self._known[counts] = best
        return best

    def chained(self, counts: Counts) -> list[Move]:
        """Two moves in a row that promise most, for counts that no single move or plain exchange makes cheaper."""
        known = self._known_chains.get(counts)
        if known is None:
            counts_RK = np.array(counts, dtype=np.int64)
            pulls = [(level.pull_RR @ (counts_RK @ level.member_GK.T))[:, level.group_K] for level in self._levels]
            left_KC = self._free_KC - counts_RK.T @ self._need_RC
            unit_R = self._unit_R1[:, 0]
            scene = Scene(self._levels, pulls, counts_RK, left_KC, self._need_RC, self._weight_R, unit_R)
            self.work += scene.num_chains / PAIRS_PER_STEP
            found = sorted(chains(scene, self._most), key=lambda each: each[0])
            known = self._known_chains[counts] = list(dict.fromkeys(move for _, move in found))[: self._most]
        return known

    def _change(self, size_RK: Ints, pulls: list[Floats]) -> Floats:
        """Change of the pairs' price for every single move [R, from, to]; inf where there is none to make."""
        j = size_RK[:, :, None].astype(np.float64)
        change = np.zeros((*size_RK.shape, size_RK.shape[1]))
        for level, pull_RK in zip(self._levels, pulls, strict=True):
            change += level.apart_KK * (j * (pull_RK[:, None, :] - pull_RK[:, :, None] + level.self_R11 * j))
        change[size_RK == 0] = np.inf
        cells = np.arange(size_RK.shape[1])
        change[:, cells, cells] = np.inf
        return change

    def _singles(self, counts_RK: Ints, size_RK: Ints, change: Floats, left_KC: Ints) -> Ranked:
        total_K = counts_RK.sum(axis=0)
        change = change.copy()
        for level in self._levels:
            if level.price:
                there_K = (level.member_GK @ total_K)[level.group_K]
                left_RK = (there_K == size_RK) * level.free_K
                opened_K = (there_K == 0) * level.free_K
                change += level.apart_KK * (opened_K - left_RK[:, :, None])
        load_RKC = size_RK[:, :, None] * self._need_RC[:, None, :]
        change[(load_RKC[:, :, None] > left_KC).any(axis=-1)] = np.inf
        return [(gain, ((role, a, b, int(size_RK[role, a])),)) for gain, (role, a, b) in _least(change, self._most)]

    def _exchanges(self, mine: tuple[Ints, Floats], theirs: tuple[Ints, Floats], left_KC: Ints) -> Ranked:
        """Members of one role from a to b, and of another one from b to a: sizes and changes of both."""
        (mine_RK, one), (theirs_RK, other) = mine, theirs
        change = one[:, None] + other.transpose(0, 2, 1)[None]
        both = (mine_RK[:, None, :, None] * theirs_RK[None, :, None, :]).astype(np.float64)
        for level in self._levels:
            change -= 2 * level.rate_RR[:, :, None, None] * level.apart_KK * both
        roles = np.arange(len(mine_RK))
        change[roles, roles] = np.inf
        mine_RKC = (mine_RK[:, :, None] * self._need_RC[:, None, :])[:, None, :, None]
        theirs_RKC = (theirs_RK[:, :, None] * self._need_RC[:, None, :])[None, :, None, :]
        more_C = mine_RKC - theirs_RKC
        change[((more_C > left_KC[None, None, None]) | (-more_C > left_KC[None, None, :, None])).any(axis=-1)] = np.inf
        return [
            (gain, ((r, a, b, int(mine_RK[r, a])), (s, b, a, int(theirs_RK[s, b]))))
            for gain, (r, s, a, b) in _least(change, self._most)
        ]

    def _gathers(self, counts_RK: Ints) -> Ranked:
        """All members of a role into one cell."""
        before = self._pairs(counts_RK)
        left_KC = self._free_KC - counts_RK.T @ self._need_RC
        found: Ranked = []
        for role, row in enumerate(counts_RK):
            used = np.flatnonzero(row)
            for cell in range(len(row)) if len(used) > 1 else ():
                if ((row.sum() - row[cell]) * self._need_RC[role] > left_KC[cell]).any():
                    continue
                trial_RK = counts_RK.copy()
                trial_RK[role] = 0
                trial_RK[role, cell] = row.sum()
                move = tuple((role, int(a), cell, int(row[a])) for a in used if a != cell)
                found.append((self._pairs(trial_RK) - before, move))
        return [each for each in found if each[0] <= 0]

    def _pairs(self, counts_RK: Ints) -> float:
        """What the pairs of members cost, all levels."""
        total = 0.0
        for level in self._levels:
            held_RG = counts_RK @ level.member_GK.T
            # Every pair of two roles is there twice, a role with itself once doubled.
            total += float((level.pull_RR * (held_RG @ held_RG.T)).sum()) / 2
        return total

    def _bound_moves(self, counts_RK: Ints, pulls: list[Floats]) -> Ranked:
        """Roles that hard relations bind, one share or all shares of a cell together."""
        found: Ranked = []
        for shares in self._bound:
            for a in range(counts_RK.shape[1]):
                times = min(int(counts_RK[role, a]) // share for role, share in shares.items())
                for factor in {1, times} if times else ():
                    size_RK = np.zeros_like(counts_RK)
                    for role, share in shares.items():
                        size_RK[role, a] = share * factor
                    change_K = self._change(size_RK, pulls)[list(shares), a].sum(axis=0)
                    found += [
                        (float(gain), tuple((role, a, b, share * factor) for role, share in shares.items()))
                        for b, gain in enumerate(change_K.tolist())
                        if b != a
                    ]
        return found


def _least(change: Floats, most: int) -> list[tuple[float, tuple[int, ...]]]:
    """The lowest entries that are no loss, with their indices."""
    flat = change.ravel()
    at = np.flatnonzero(flat <= 0)
    at = at[np.argsort(flat[at], kind="stable")[:most]]
    where = zip(*(index.tolist() for index in np.unravel_index(at, change.shape)), strict=True)
    return list(zip(flat[at].tolist(), where, strict=True))
