"""Owns relaying: target ranks that want the same bytes read a share each from the trainers, and the rest from peers.

With R replicas the trainers then send every byte once instead of R times. The tensors are divided into slabs in layer
order. While the peers exchange one slab, they read their shares of the next one: stage 0 reads, stages 1 to n - 1 read
and exchange, stage n exchanges. A stage starts when the one before it has ended everywhere; a peer serves a tensor as
it lies in its region, after it has checked it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux_weightplan.classes import Joined, TensorClass
from reflux_weightplan.sides import Bools, Ints, Side


@dataclass(frozen=True)
class Peers:
    """Target ranks by content: `group_D` names the content of a rank, `share_D` is its number among equal ranks."""

    group_D: Ints
    share_D: Ints
    members: tuple[Ints, ...]

    @property
    def shares(self) -> int:
        """Number of shares: the size of the smallest group, 1 when some rank is alone."""
        return min(len(members) for members in self.members)

    @property
    def distinct(self) -> Ints:
        """One rank of every content."""
        return np.array([members[0] for members in self.members])


def find_peers(target: Side) -> Peers:
    """Groups the target ranks that hold exactly the same boxes of all tensors."""
    columns = np.ascontiguousarray(target.box_KR.T)
    numbers: dict[bytes, list[int]] = {}
    for rank, row in enumerate(columns):
        numbers.setdefault(row.tobytes(), []).append(rank)
    group_D, share_D = np.empty(target.ranks, np.int64), np.empty(target.ranks, np.int64)
    for group, members in enumerate(numbers.values()):
        group_D[members] = group
        share_D[members] = np.arange(len(members))
    return Peers(group_D, share_D, tuple(np.array(members) for members in numbers.values()))


@dataclass(frozen=True)
class Division:
    """`label_T` = slab * shares + share of every target tensor."""

    label_T: Ints
    slabs: int
    shares: int

    def wants(self, slab: int, peers: Peers) -> Bools:
        """Which labels a target rank reads from the trainers in a slab, bool [labels, ranks]."""
        wants = np.zeros((self.slabs * self.shares, len(peers.share_D)), bool)
        for share in range(self.shares):
            wants[slab * self.shares + share] = peers.share_D == share
        return wants


def divide(joined: Joined, target: Side, peers: Peers, slabs: int) -> Division:
    """Deals tensors to slabs by layer order and to shares by size, so that no peer gets much more than another."""
    size_T = np.zeros(len(joined.class_T))
    for each in joined.classes:
        bytes_D = target.bytes_KR[each.target_kind]
        size_T[each.tensors] = bytes_D.sum()
    order = joined.order_T
    done = np.cumsum(size_T[order])
    slab_T = np.empty(len(order), np.int64)
    slab_T[order] = np.minimum((done - size_T[order] / 2) * slabs // done[-1], slabs - 1)
    share_T = np.zeros(len(order), np.int64)
    load = np.zeros((slabs, peers.shares, target.ranks))
    for each in sorted(joined.classes, key=lambda one: -int(target.bytes_KR[one.target_kind].max())):
        for slab in range(slabs):
            _deal(each, np.flatnonzero(slab_T[each.tensors] == slab), target, load[slab], share_T)
    return Division(slab_T * peers.shares + share_T, slabs, peers.shares)


def _deal(each: TensorClass, positions: Ints, target: Side, load_XD: np.ndarray, share_T: Ints) -> None:
    """Gives each of the class's tensors to the share with the least bytes so far."""
    bytes_D = target.bytes_KR[each.target_kind]
    ranks = np.flatnonzero(bytes_D)
    if not len(positions) or not len(ranks):
        return
    size = float(bytes_D[ranks].max())
    heap = [(float(load), share) for share, load in enumerate(load_XD[:, ranks].max(axis=1))]
    heapq.heapify(heap)
    counts = np.zeros(len(heap))
    for tensor in each.tensors[positions].tolist():
        load, share = heapq.heappop(heap)
        share_T[tensor] = share
        counts[share] += 1
        heapq.heappush(heap, (load + size, share))
    load_XD[:, ranks] += counts[:, None] * bytes_D[ranks]


@dataclass(frozen=True)
class Exchange:
    """What peers read from each other in one slab: int64 [ranks, ranks], from row to column."""

    nbytes: Ints
    messages: Ints


def exchange(classes: Sequence[TensorClass], target: Side, peers: Peers, division: Division, slab: int) -> Exchange:
    """Every rank reads each share of the slab from the peer that has it, tensor by tensor."""
    nbytes = np.zeros((target.ranks, target.ranks), np.int64)
    messages = np.zeros_like(nbytes)
    held_XD = np.zeros((division.shares, target.ranks), np.int64)
    count_XD = np.zeros_like(held_XD)
    for each in classes:
        labels = division.label_T[each.tensors]
        counts = np.bincount(labels[labels // division.shares == slab] % division.shares, minlength=division.shares)
        bytes_D = target.bytes_KR[each.target_kind]
        held_XD += counts[:, None] * bytes_D
        count_XD += counts[:, None] * (bytes_D > 0)
    for members in peers.members:
        for share in range(division.shares):
            owner = members[share]
            readers = np.setdiff1d(members, owner)
            nbytes[owner, readers] = held_XD[share, readers]
            messages[owner, readers] = count_XD[share, readers]
    return Exchange(nbytes, messages)
