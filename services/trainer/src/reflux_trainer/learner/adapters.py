"""Publishes models beside the learner's own: the factors of adapters, and its weights with adapters added in."""

import asyncio
from collections import OrderedDict

from grpc.aio import Channel

from reflux_model.lora import merged
from reflux_model.parameters import Parameters
from reflux_trainer.learner.lora import LoraAdapter
from reflux_trainer.learner.publish import Outlet, WeightPublisher

_KEPT = 8
"""Publishers whose arenas stay; each has room for two copies of what it publishes."""


def merged_weights(params: Parameters, adapter: LoraAdapter | None) -> Parameters:
    """The weights with an adapter added in, or as they are."""
    return params if adapter is None else merged(params, adapter.params, adapter.spec)


class PublishersBeside:
    """Owns one publisher per model that is published beside the learner's: each has epochs and arenas of its own."""

    def __init__(self, channel: Channel, outlet: Outlet) -> None:
        self._channel, self._outlet = channel, outlet
        self._publishers: OrderedDict[str, tuple[tuple[str, ...], WeightPublisher]] = OrderedDict()
        self._turns: dict[str, asyncio.Lock] = {}

    def turn(self, model_id: str) -> asyncio.Lock:
        """Held while a version of the model is published: one after the other."""
        return self._turns.setdefault(model_id, asyncio.Lock())

    async def of(self, model_id: str, params: Parameters) -> WeightPublisher:
        """The publisher of a model; one of other tensors begins anew."""
        tensors, (known, publisher) = tuple(params), self._publishers.get(model_id, ((), None))
        if publisher is not None and known == tensors:
            self._publishers.move_to_end(model_id)
            return publisher
        if publisher is not None:
            await self._publishers.pop(model_id)[1].close()
        publisher = await asyncio.to_thread(WeightPublisher, self._channel, model_id, params, self._outlet)
        self._publishers[model_id] = tensors, publisher
        await self._close_idle()
        return publisher

    async def close(self) -> None:
        """Withdraws all."""
        while self._publishers:
            await self._publishers.popitem()[1][1].close()

    async def _close_idle(self) -> None:
        """Withdraws the ones that were used longest ago, except those that publish."""
        idle = [name for name in self._publishers if not self.turn(name).locked()]
        for name in idle[: max(0, len(self._publishers) - _KEPT)]:
            await self._publishers.pop(name)[1].close()
