"""Owns what one rank of a publisher packs for replicas of other layouts: a plan for each pair of layouts, kept."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc.aio import AioRpcError

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_transfer.arenas.geometry import MAX_PACKINGS, Packing
from reflux_transfer.arenas.packing import packing
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.client import wire
from reflux_transfer.client.offer import PACKED
from reflux_transfer.layout import aligned
from reflux_weightplan.errors import WeightPlanError
from reflux_weightplan.expand import Expander
from reflux_weightplan.plan import plan
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import layout_hash

if TYPE_CHECKING:
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub

log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0


class Targets:
    """The layouts of a model's replicas, as far as they are not the publisher's own.

    Nothing here fails a version: whom nothing is packed for reads covering pieces, which is more bytes. Why is logged.
    """

    def __init__(
        self,
        stub: "WeightBrokerServiceAsyncStub",
        model_id: str,
        layout: SpecLayout,
        rank: int,
        arenas: PublisherArenas,
    ) -> None:
        """`layout` is that of all ranks of the publisher, `arenas` are those of `rank`."""
        self._stub, self._model_id = stub, model_id
        self._layout, self._rank, self._arenas = layout, rank, arenas
        self._own = layout_hash(layout)
        self._packings: dict[str, Packing] = {}
        self._left: list[str] = []
        """For whom there was no room the last time."""

    async def packings(self) -> tuple[Packing, ...]:
        """For the replicas that are registered now, in the order of their layouts' first registration.

        At most as many as an arena names, and as many bytes as it has room for.
        """
        wanted = [name for name in await self._registered() if name != self._own]
        found, left, room = list[Packing](), list[str](), self._arenas.pack_room
        self._packings = {name: self._packings[name] for name in wanted if name in self._packings}
        for name in wanted[:MAX_PACKINGS]:
            made = self._packings.get(name) or await self._made(name)
            if made is None:
                continue
            self._packings[name] = made
            if aligned(made.pack_bytes) > room:
                left.append(f"{name} ({made.pack_bytes} bytes)")
                continue
            found.append(made)
            room -= aligned(made.pack_bytes)
        left += wanted[MAX_PACKINGS:]
        if left != self._left:
            log.warning("not packed for layouts %s: %d bytes of room are left", ", ".join(left) or "none", room)
            self._left = left
        return tuple(found)

    async def _registered(self) -> Sequence[str]:
        request = pb.GetVersionRequest(model_id=self._model_id)
        try:
            return (await self._stub.GetVersion(request, timeout=_ASK_SECONDS)).target_layouts
        except AioRpcError as error:  # nobody is there yet, or the broker is away: announcing the version will tell
            log.debug("the layouts of replicas are not known: %s", error.details())
            return ()

    async def _made(self, name: str) -> Packing | None:
        """None where that fails; it is tried again with the next version."""
        try:
            target = await wire.get_layout(self._stub, name)
            made = await asyncio.to_thread(self._plan, target)
            log.info("layout %s: %d bytes to pack, %d further pieces", name, made.pack_bytes, len(made.extras))
            return made
        except AioRpcError as error:
            log.warning("layout %s is not packed for: %s", name, error.details())
        except WeightPlanError as error:  # its replicas find the same, and abort the version with it
            log.warning("layout %s cannot be filled: %s", name, error)
        return None

    def _plan(self, target: SpecLayout) -> Packing:
        """Also without extras: readers look for the plan in the offers of all ranks."""
        planned, arenas = plan(self._layout, target, PACKED), self._arenas
        pieces = Expander(planned).pieces(self._rank)
        return packing(planned.hash, pieces, arenas.layout, arenas.slice_bytes)
