"""Owns who holds what on which node; never hands out more than a node has."""

from collections.abc import Iterable, Mapping

from reflux_scheduler.gang import GangDemand, Placement
from reflux_scheduler.placement import find_place, place
from reflux_scheduler.topology import UNAVAILABLE, Resources, Topology


class Inventory:
    """Allocations of jobs on a topology, and which nodes can take work now."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._held: dict[str, Placement] = {}
        self._free = list(topology.totals)
        self._free_gpus = [tuple(range(node.resources.gpus)) for node in topology.nodes]
        self._available: set[str] = set()

    def set_available(self, nodes: Iterable[str]) -> None:
        """Names of the nodes that new work may go to (those with a live agent)."""
        self._available = {node for node in nodes if node in self.topology}

    @property
    def absent_nodes(self) -> tuple[str, ...]:
        """Nodes that cannot take work now, in topology order."""
        return tuple(node.name for node in self.topology.nodes if node.name not in self._available)

    def free(self) -> list[Resources]:
        """Room for new work per node index."""
        return [
            room if node.name in self._available else UNAVAILABLE
            for node, room in zip(self.topology.nodes, self._free, strict=True)
        ]

    def unallocated(self, node: str) -> Resources:
        """What nobody holds on a node, whether or not it can take work now."""
        return self._free[self.topology.index_of(node)]

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Placements by job."""
        return self._held

    def fits(self, gang: GangDemand) -> bool:
        """Whether a gang would find a place now."""
        return find_place(self.topology, self.free(), gang) is not None

    def place(self, job: str, gang: GangDemand) -> Placement | None:
        """Finds a place for a gang and takes it; None, and nothing taken, when it does not fit now."""
        placement = place(self.topology, self.free(), self._free_gpus, gang)
        if placement is not None:
            self.take(job, placement)
        return placement

    def take(self, job: str, placement: Placement) -> None:
        """Books a placement that was decided before, for instance before a restart.

        Raises:
            LookupError: it names a node that the topology no longer has.
            ValueError: it needs something that another job holds.
        """
        assert job not in self._held, f"{job} is booked already"
        free, gpus = list(self._free), list(self._free_gpus)
        for member in placement.members:
            index = self.topology.index_of(member.node)
            missing = [gpu for gpu in member.gpu_indices if gpu not in gpus[index]]
            if missing or not member.share.fits_in(free[index]):
                raise ValueError(f"{job}: {member.role}/{member.rank} does not fit on {member.node} any more")
            free[index] = free[index] - member.share
            gpus[index] = tuple(gpu for gpu in gpus[index] if gpu not in member.gpu_indices)
        self._free, self._free_gpus = free, gpus
        self._held[job] = placement

    def release(self, job: str) -> None:
        """Gives back what a job holds; does nothing when it holds nothing."""
        placement = self._held.pop(job, None)
        if placement is None:
            return
        for member in placement.members:
            index = self.topology.index_of(member.node)
            self._free[index] = self._free[index] + member.share
            self._free_gpus[index] = tuple(sorted((*self._free_gpus[index], *member.gpu_indices)))
