"""Owns a quick proof that a gang cannot fit: sums and maxima per number of GPUs, whatever its constraints; and for a
gang of one role the members that the best domain of its required level holds.

Most asks of a full cluster fail here in microseconds; only the others are searched for (`place.search`).
"""

from reflux_placement.gang import GangDemand, RoleDemand
from reflux_placement.place.capacity import copies_per_node
from reflux_placement.place.misfit import Misfit
from reflux_placement.room import Room
from reflux_placement.topology import CLUSTER, NODE, Ints, Resources


class Prescreen:
    """Bounds on what the open nodes of a room hold; they stay true while room only shrinks."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._usable_NR: Ints = room.usable_NR()
        self._by_size: dict[tuple[Resources, int], tuple[int, int]] = {}
        self._by_gpus: dict[int, tuple[int, int, int]] = {}
        self._sums: list[int] = self._usable_NR.clip(min=0).sum(axis=0).tolist()

    def hopeless(self, gang: GangDemand) -> Misfit | None:
        """Why the gang cannot fit, if the bounds show it; None says nothing."""
        needed = [0, 0, 0]
        for role in gang.roles:
            if not role.least:
                continue
            members, millicpus, memory_bytes = self._bounds(role.each.gpus)
            row = role.each.row
            if role.each.gpus and members < role.least:
                return self._too_few(role, members)
            if row[1] > millicpus or row[2] > memory_bytes:
                return None if role.each.gpus else self._too_large(role, 1 if row[1] > millicpus else 2)
            for kind in range(3):
                needed[kind] += row[kind] * role.least
        for kind in range(3):
            if needed[kind] > self._sums[kind]:
                return self._misfit("", "sum", CLUSTER, kind, needed[kind], self._sums[kind], self._cluster)
        return self._nowhere(gang) if len(gang.roles) == 1 else None

    def _nowhere(self, gang: GangDemand) -> Misfit | None:
        """Whether no domain of the level that one role must stay in holds its members."""
        role, topology = gang.roles[0], self._room.topology
        at = min(topology.tightness(gang.required_level), topology.tightness(role.required_level))
        known = self._by_size.get((role.each, at))
        if known is None:
            sums = topology.sums(copies_per_node(self._usable_NR, role.each), at)
            best = int(sums.argmax()) if len(sums) else -1
            known = self._by_size[role.each, at] = (best, int(sums[best]) if best >= 0 else 0)
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
