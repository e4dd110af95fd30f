"""Follows the weight broker: new versions are pulled into the idle arena and become current between decode steps."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import torch

from reflux_inference_gateway.engine.core import Weights
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.channel import open_channel
from reflux_model.parameters import Parameters
from reflux_transfer.arena import ReplicaArenas
from reflux_transfer.client.subscriber import BrokerSubscriber, Update
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.layout import Layout
from reflux_transfer.probe import probe

log = logging.getLogger(__name__)


async def probe_transfer() -> None:
    """Logs which transports this host has and would choose. Without any the replica starts all the same: the publisher
    chooses, and a pull that cannot work fails the sync with its reason.
    """
    try:
        await asyncio.to_thread(probe)
    except BackendUnavailable as error:
        log.error("%s", error)


def layout_of(params: Parameters) -> Layout:
    """The layout that the replica registers: names, shapes and dtypes in the parameters' order."""
    return Layout.from_shapes(
        {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in params.items()}
    )


def views(layout: Layout, buffer: memoryview) -> dict[str, torch.Tensor]:
    """Tensors that lie in an arena's buffer, without a copy; valid as long as nobody pulls into it."""
    params = {}
    for slot in layout.slots:
        flat = torch.frombuffer(buffer[slot.offset : slot.end], dtype=getattr(torch, slot.dtype))
        params[slot.name] = flat.view(slot.shape)
    return params


@asynccontextmanager
async def following(
    settings: EngineSettings,
    model_id: str,
    replica: str,
    engine: EngineLoop,
    weights: Weights,
    announce: Callable[[], None],
    fatal: Callable[[str], None],
) -> AsyncIterator[None]:
    """Keeps the engine at the broker's committed version while the block runs.

    `announce` is called after each swap, so that requests that wait for the version are routed at once; `fatal` when
    the broker refuses the replica (another layout): it would serve old weights for ever.
    """
    layout = layout_of(weights.params)

    async def apply(update: Update) -> float:
        fresh = Weights(views(layout, update.buffer), update.version, update.epoch)
        pause_ms = await asyncio.wrap_future(engine.swap(fresh))
        announce()
        return pause_ms

    async with open_channel(settings.broker_address, settings, retry=RETRY, subject="engine") as channel:
        subscriber = BrokerSubscriber(
            channel, replica=replica, model_id=model_id, arenas=ReplicaArenas(layout), apply=apply
        )
        task = asyncio.create_task(subscriber.run())

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                fatal(f"the weight broker refuses this replica: {error}")

        task.add_done_callback(ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
