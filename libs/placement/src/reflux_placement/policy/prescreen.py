"""Owns a quick proof that a gang cannot fit: sums and maxima per number of GPUs, whatever its constraints; and for a
gang of one role the members that the best domain of its required level holds.

Most asks of a full cluster fail here in microseconds; only the others are searched for (`place.search`).
"""

import numpy as np

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.misfit import Misfit
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NODE, Ints, Resources

UNSAID = Misfit(role="", constraint="sum", level=CLUSTER, resource="gpus", needed=0, available=0)
"""The answer where nobody asks why: it only says that the gang does not fit."""


class Prescreen:
    """Bounds on what the open nodes of a room hold; they stay true while room only shrinks."""

    def __init__(self, room: Room, *, explain: bool) -> None:
        self._room, self._explain = room, explain
        self._usable_NR: Ints = room.usable_NR()
        self._by_size: dict[tuple[tuple[int, int, int], int], tuple[int, int]] = {}
        self._by_gpus: dict[int, tuple[int, int, int]] = {}
        self._with_gpus: dict[int, Ints] = {}
        self._sums: list[int] = self._usable_NR.clip(min=0).sum(axis=0).tolist()
        self._total = Resources(*self._sums)

    def hopeless(self, gang: GangDemand) -> Misfit | None:
        """Why the gang cannot fit, if the bounds show it; None says nothing."""
        for role in gang.roles:
            least = role.least
            if not least:
                continue
            each = role.each
            members, millicpus, memory_bytes = self._bounds(each.gpus)
            if each.gpus and members < least:
                return self._too_few(role, members)
            if each.millicpus > millicpus or each.memory_bytes > memory_bytes:
                return None if each.gpus else self._too_large(role, 1 if each.millicpus > millicpus else 2)
        needed = gang.least_total()
        if not needed.fits_in(self._total):
            kind = next(kind for kind in range(3) if needed.row[kind] > self._sums[kind])
            return self._misfit("", "sum", CLUSTER, kind, needed.row[kind], self._sums[kind], self._cluster)
        return self._nowhere(gang) if len(gang.roles) == 1 else None

    def _nowhere(self, gang: GangDemand) -> Misfit | None:
        """Whether no domain of the level that one role must stay in holds its members."""
        role, topology = gang.roles[0], self._room.topology
        at = min(topology.tightness(gang.required_level), topology.tightness(role.required_level))
        key = (role.each.row, at)
        known = self._by_size.get(key)
        if known is None:
            sums = topology.sums(self._copies_N(role.each), at)
            best = int(sums.argmax()) if len(sums) else -1
            known = self._by_size[key] = (best, int(sums[best]) if best >= 0 else 0)
        best, members = known
        if members >= role.least or best < 0:
            return None
        domain = topology.domains_by_level[at][best].label
        kind = 0 if role.each.gpus else 1 if role.each.millicpus else 2
        unit = role.each.row[kind]
        return self._misfit(
            role.role,
            "count",
            domain=domain,
            level=topology.levels[at],
            kind=kind,
            needed=role.least * unit,
            available=members * unit,
        )

    def _copies_N(self, each: Resources) -> Ints:
        """Members of a size on every node. Few nodes of a full cluster have GPUs left: the others are not divided."""
        if not each.gpus:
            return copies_per_node(self._usable_NR, each)
        nodes_K = self._with_gpus.get(each.gpus)
        if nodes_K is None:
            nodes_K = self._with_gpus[each.gpus] = np.flatnonzero(self._usable_NR[:, 0] >= each.gpus)
        copies_N = np.zeros(len(self._usable_NR), dtype=np.int64)
        copies_N[nodes_K] = copies_per_node(self._usable_NR[nodes_K], each)
        return copies_N

    def _bounds(self, gpus: int) -> tuple[int, int, int]:
        """Members of so many GPUs that fit (0 for none), most CPUs and most memory of a node that holds one."""
        known = self._by_gpus.get(gpus)
        if known is None:
            fits_NR = self._usable_NR[self._usable_NR[:, 0] >= gpus]
            members = int((fits_NR[:, 0] // gpus).sum()) if gpus else 0
            most = fits_NR.max(axis=0, initial=-1)
            known = self._by_gpus[gpus] = (members, int(most[1]), int(most[2]))
        return known

    def _too_few(self, role: RoleDemand, members: int) -> Misfit:
        gpus = role.each.gpus
        if not members:
            return self._too_large(role, 0)
        return self._misfit(role.role, "count", CLUSTER, 0, role.least * gpus, members * gpus, self._cluster)

    def _too_large(self, role: RoleDemand, kind: int) -> Misfit:
        node = int(self._usable_NR[:, kind].argmax())
        most = max(0, int(self._usable_NR[node, kind]))
        if not self._room.open_N.any():
            return self._misfit("", "nodes", CLUSTER, 0, 1, 0, "")
        return self._misfit(role.role, "size", NODE, kind, role.each.row[kind], most, self._room.topology.path(node))

    @property
    def _cluster(self) -> str:
        return self._room.topology.name

    def _misfit(
        self, role: str, constraint: str, level: str, kind: int, needed: int, available: int, domain: str
    ) -> Misfit:
        if not self._explain:
            return UNSAID
        return Misfit(
            role=role,
            constraint=constraint,  # pyright: ignore[reportArgumentType]
            level=level,
            resource=("gpus", "millicpus", "memory_bytes")[kind],
            needed=needed,
            available=available,
            domain=domain,
            fragmented=constraint in ("count", "size") and self._sums[kind] >= needed,
        )
