"""The learner's half of a publish: weights of a model folder, staged in arenas and handed out by the broker."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from reflux_kit.channel import open_channel
from reflux_model.folder import load_folder
from reflux_transfer import fingerprint
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.client.publisher import BrokerPublisher, Published
from reflux_transfer.client.wire import RETRY
from reflux_transfer.layout import Layout
from reflux_transfer.registry import open_backend

SYNC_SECONDS = 120.0
Weights = Mapping[str, torch.Tensor]


def folder_weights(model: Path) -> Weights:
    """The folder's tensors in bfloat16, in the learner's order."""
    return load_folder(model, dtype=torch.bfloat16)[1]


def perturbed(weights: Weights, scale: float = 0.02) -> Weights:
    """A second version: every matrix with noise of `scale` times its own deviation, enough to change what is said."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (wide + torch.randn(wide.shape, generator=generator) * wide.std() * scale).bfloat16()
        if (wide := weight.float()).ndim == 2
        else weight
        for name, weight in weights.items()
    }


class Learner:
    """Publishes one model. `fingerprint` is the one of the last published weights, computed where they were staged."""

    def __init__(self, broker_address: str, model_id: str, weights: Weights, transport: str) -> None:
        shapes = {name: (tuple(weight.shape), "bfloat16") for name, weight in weights.items()}
        self._backend = open_backend(transport)
        self._arenas = PublisherArenas(self._backend, Layout.from_shapes(shapes))
        self._address, self._model_id = broker_address, model_id
        self.fingerprint = 0

    async def publish(self, weights: Weights, version: int, *, flip: bool = False) -> Published:
        """One version to at least one replica; `flip` makes a checksum differ from its bytes."""
        async with open_channel(self._address, retry=RETRY) as channel:
            publisher = BrokerPublisher(channel, self._model_id, self._arenas)
            try:
                return await self._publish(publisher, weights, version, flip)
            finally:
                await publisher.close()

    async def _publish(self, publisher: BrokerPublisher, weights: Weights, version: int, flip: bool) -> Published:
        begun = await publisher.begin(version, sync_timeout_seconds=SYNC_SECONDS, min_replicas=1)
        async with begun as publishing:
            staging = publishing.staging
            if flip:
                ready = staging._ready
                staging._ready = lambda index, checksum: ready(index, checksum ^ 4 if index == 5 else checksum)
            await asyncio.to_thread(publishing.write, {name: _words(weight) for name, weight in weights.items()})
            # Over the bytes that lie there, not from what `write` has counted on the way.
            self.fingerprint = fingerprint.of(self._arenas.view(staging.generation), self._arenas.layout)
            return await publishing.finish()

    def close(self) -> None:
        """Withdraws the arenas."""
        self._arenas.close()
        self._backend.close()


def _words(weight: torch.Tensor) -> np.ndarray:
    return weight.contiguous().view(torch.uint16).numpy()
