"""Distribution of weights: staged by the thread that owns them, handed out by the broker while training goes on."""

from dataclasses import dataclass

import torch
from grpc.aio import Channel

from reflux_model.parameters import Parameters
from reflux_transfer.arena import PublisherArenas, StagedWeights
from reflux_transfer.client.publisher import BrokerPublisher, Published
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend

_STAGE_SECONDS = 5.0
"""Longest wait for a free arena; publishes follow each other, so one is free unless a lease is still running out."""


WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Outlet:
    """How weights leave the learner: over which transport, in which type (rounded to nearest even)."""

    transport: str
    dtype: torch.dtype = torch.float32


class WeightPublisher:
    """The publishing half of one model; calls are made one after the other."""

    def __init__(self, channel: Channel, model_id: str, params: Parameters, outlet: Outlet) -> None:
        dtype = str(outlet.dtype).removeprefix("torch.")
        shapes = {name: (tuple(tensor.shape), dtype) for name, tensor in params.items()}
        self._dtype = outlet.dtype
        self._backend = open_backend(outlet.transport)
        self._arenas = PublisherArenas(self._backend, Layout.from_shapes(shapes))
        self._broker = BrokerPublisher(channel, model_id, self._arenas)
        self.num_bytes = self._arenas.layout.parameter_bytes
        self.epoch = 0
        """Epoch of the last committed version."""

    def restored(self, epoch: int) -> None:
        """The weights come from a state that was saved at `epoch`."""
        self.epoch = epoch
        self._broker.restored(epoch)

    def stage(self, params: Parameters) -> StagedWeights:
        """Copies the weights into an arena; called by the thread that owns them. Raises `ArenasBusy`."""
        cast = {name: tensor.detach().to(self._dtype).view(torch.uint8).numpy() for name, tensor in params.items()}
        return self._arenas.stage(cast, _STAGE_SECONDS)

    async def distribute(
        self, staged: StagedWeights, version: int, *, sync_timeout_seconds: float, min_replicas: int, request_id: str
    ) -> Published:
        """Hands out what `stage` copied; errors as in `BrokerPublisher.distribute`."""
        published = await self._broker.distribute(
            staged,
            version,
            sync_timeout_seconds=sync_timeout_seconds,
            min_replicas=min_replicas,
            request_id=request_id,
        )
        self.epoch = published.epoch
        return published

    def close(self) -> None:
        """Withdraws the arenas."""
        self._arenas.close()
        self._backend.close()
