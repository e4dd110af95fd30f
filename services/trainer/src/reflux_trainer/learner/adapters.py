"""Publishes named parts of the model as versions of their own, on top of the last committed weights."""

import asyncio
from collections.abc import Sequence

from grpc.aio import Channel

from reflux_kit.errors import InvalidRequest
from reflux_kit.scope import ADAPTERS
from reflux_model.parameters import Parameters
from reflux_trainer.learner.publish import Outlet, WeightPublisher


def chosen(params: Parameters, tensors: Sequence[str]) -> Parameters:
    """The tensors of an adapter, in the model's order. Raises `InvalidRequest` naming those that the model lacks."""
    missing = [name for name in tensors if name not in params]
    if missing or not tensors:
        raise InvalidRequest(f"an adapter needs tensors of the model; unknown are {missing}", field="adapter_tensors")
    return {name: tensor for name, tensor in params.items() if name in set(tensors)}


class AdapterPublishers:
    """Owns one publisher per adapter of a model: `<model>/adapters/<name>` has epochs and arenas of its own."""

    def __init__(self, channel: Channel, model_id: str, outlet: Outlet) -> None:
        self._channel, self._model_id, self._outlet = channel, model_id, outlet
        self._publishers: dict[str, tuple[tuple[str, ...], WeightPublisher]] = {}

    async def of(self, name: str, params: Parameters) -> WeightPublisher:
        """The publisher of an adapter; an adapter of other tensors begins anew."""
        tensors, (known, publisher) = tuple(params), self._publishers.get(name, ((), None))
        if publisher is not None and known == tensors:
            return publisher
        if publisher is not None:
            await self._publishers.pop(name)[1].close()
        model_id = f"{self._model_id}{ADAPTERS}{name}"
        publisher = await asyncio.to_thread(WeightPublisher, self._channel, model_id, params, self._outlet)
        self._publishers[name] = tensors, publisher
        return publisher

    async def close(self) -> None:
        """Withdraws all."""
        while self._publishers:
            await self._publishers.popitem()[1][1].close()
