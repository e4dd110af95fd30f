"""Publishing of sharded weights: every rank offers its own slices, replicas read what they need, nobody gathers."""

import asyncio
import logging
from dataclasses import replace

import torch
from grpc.aio import Channel

from reflux_model.config import ModelConfig
from reflux_model.parameters import Parameters
from reflux_model.shapes import parameter_shapes
from reflux_trainer.learner.publish import Outlet, PublishOrder, WeightPublisher
from reflux_trainer.learner.ranks.group import RankGroup
from reflux_trainer.learner.ranks.setup import RankLost
from reflux_transfer.client.offer import SourceRegion
from reflux_transfer.client.publisher import Published, Publishing
from reflux_weightplan.mesh import Cut, Mesh, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

log = logging.getLogger(__name__)


def spread_layout(config: ModelConfig, dtype: torch.dtype, ranks: int) -> SpecLayout:
    """How FSDP2 lays a model over ranks: torch.chunk of dimension 0 of every tensor."""
    cut, name = Placement((Cut(0, "shard", "chunk"),)), str(dtype).removeprefix("torch.")
    shapes = parameter_shapes(config).items()
    return SpecLayout(Mesh((("shard", ranks),)), tuple(TensorSpec(each, shape, name, cut) for each, shape in shapes))


class ShardedPublisher(WeightPublisher):
    """Rank 0's publisher; the ones of the other ranks do what it tells them."""

    def __init__(self, channel: Channel, model_id: str, config: ModelConfig, outlet: Outlet, group: RankGroup) -> None:
        if outlet.delta:
            log.warning("weight_delta is ignored: versions of several ranks are published in full")
            outlet = replace(outlet, delta=False)
        self._group, self._dtype = group, outlet.dtype
        spread = spread_layout(config, outlet.dtype, len(group.pids) + 1)
        super().__init__(channel, model_id, {}, outlet, spread)
        self._tell("open", model_id, outlet, spread)

    async def begin(self, version: int, order: PublishOrder, base_epoch: int = 0) -> Publishing:
        """Claims an arena on every rank and announces the version."""
        regions: list[SourceRegion] = await asyncio.to_thread(self._tell, "claim", order.sync_timeout_seconds)
        self._others = tuple(regions)
        return await super().begin(version, order, base_epoch)

    def write(self, publishing: Publishing, params: Parameters) -> None:
        """All ranks copy their slices at the same time."""
        self._group.works.staging = publishing.staging
        self._group.everywhere("write", self._dtype)

    async def finish(self, publishing: Publishing) -> Published:
        """As of one rank; then the others pin the version, or give it up."""
        committed = False
        try:
            published = await super().finish(publishing)
            committed = True
            return published
        finally:
            await asyncio.to_thread(self._tell, "settle", committed)

    async def close(self) -> None:
        """Withdraws the arenas of all ranks; those of a lost one went with its process."""
        try:
            await asyncio.to_thread(self._tell, "close")
        except RankLost as lost:
            log.warning("a rank cannot withdraw its arenas: %s", lost)
        await super().close()

    def _tell(self, method: str, *arguments: object) -> list:
        return self._group.others("publish", method, [arguments] * len(self._group.pids))
