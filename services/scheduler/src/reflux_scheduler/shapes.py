"""Owns which gangs could ever fit: an answer per shape, because the topology stays the same and most jobs are alike."""

import asyncio

from reflux_placement.gang import GangDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import fits_ever
from reflux_placement.topology import Topology
from reflux_scheduler.job import Job

_KNOWN_SHAPES = 1024


class Shapes:
    """Asked on the event loop, answered by a thread: on 25,000 nodes a new shape takes a millisecond, and thousands of
    jobs are taken over at once while the leader's lease has to be renewed."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[GangDemand, Misfit | None] = {}

    async def misfit(self, demand: GangDemand) -> Misfit | None:
        """Why a gang fits nowhere, even on an empty cluster; None when it does."""
        if demand not in self._known:
            found = await asyncio.to_thread(fits_ever, self._topology, demand)
            if len(self._known) >= _KNOWN_SHAPES:
                self._known.clear()
            self._known[demand] = found
        return self._known[demand]

    async def of_failed(self, job: Job) -> Misfit | None:
        """What a job lacks that was failed because it fits nowhere."""
        if job.state != "FAILED" or job.attempt:
            return None
        return await self.misfit(job.spec.demand())
