"""Follows the weight broker: new versions are pulled into the arenas and become current between decode steps."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpc.aio import Channel

from reflux_inference_gateway.engine.holding import Holding
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.replica import Description
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.channel import open_channel
from reflux_kit.scope import ADAPTERS
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Update
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.receiver import Apply
from reflux_transfer.client.reporting import reporting
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.swap import SwapReceiver
from reflux_transfer.client.wire import RETRY, scope_of
from reflux_transfer.probe.choice import Choice
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.registry import open_backend

log = logging.getLogger(__name__)


class Follower:
    """Owns the engine's side of the protocol: what the subscriber asks of an engine, and what became of it."""

    def __init__(
        self, engine: EngineLoop, holding: Holding, description: Description, announce: Callable[[], None]
    ) -> None:
        """`announce` is called after each commit, so that requests that wait for the version are routed at once, and
        whenever the replica's health may have changed.
        """
        self.holding = holding
        self._engine, self._description, self._announce = engine, description, announce

    async def apply(self, update: Update) -> float:
        """Serves an update; see `Apply` of `reflux_transfer.client.receiver`."""
        weights = self.holding.weights(update.index, update.version, update.epoch)
        try:
            return await asyncio.wrap_future(self._engine.swap(weights, update.fill))
        finally:
            self._announce()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Scores the probe prompt."""
        return (await asyncio.wrap_future(self._engine.score(token_ids))).logprobs

    def judged(self, fault: str) -> None:
        """The broker has compared the scores with the learner's."""
        if fault:
            log.error("this replica is unhealthy: %s", fault)
        self._description.fault = fault
        self._announce()


@dataclass(frozen=True)
class Followed:
    """What a replica follows: the model, and adapters by name; and what its self-test says of the transports."""

    model: Follower
    adapters: Mapping[str, Holding] = field(default_factory=dict)
    choice: Choice | None = None


@asynccontextmanager
async def following(
    settings: EngineSettings,
    model_id: str,
    replica: str,
    followed: Followed,
    engine: EngineLoop,
    fatal: Callable[[str], None],
) -> AsyncIterator[None]:
    """Keeps the engine at the broker's committed versions while the block runs.

    `fatal` is called when the broker refuses the replica (another layout): it would serve old weights for ever.
    """
    model, paths = followed.model, PathBook(settings.transfer)
    async with (
        open_channel(settings.broker_address, settings, retry=RETRY, subject="engine") as channel,
        reporting(channel, replica, followed.choice, paths),
    ):
        subscribe = partial(_subscriber, channel, replica, settings, paths)
        subscribers = [
            subscribe(model_id, model.holding, model.apply, probe=model.score, judged=model.judged),
            *(
                subscribe(f"{model_id}{ADAPTERS}{name}", holding, _keeps(engine, name, holding))
                for name, holding in followed.adapters.items()
            ),
        ]

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                fatal(f"the weight broker refuses this replica: {error}")

        tasks = [asyncio.create_task(subscriber.run()) for subscriber in subscribers]
        for task in tasks:
            task.add_done_callback(ended)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _subscriber(
    channel: Channel,
    replica: str,
    settings: EngineSettings,
    paths: PathBook,
    model_id: str,
    holding: Holding,
    apply: Apply,
    **hooks: Any,
) -> BrokerSubscriber:
    kind = SwapReceiver if holding.mode.mode == "swap" else InPlaceReceiver
    scope = scope_of(model_id, settings.stack_secret)
    puller = Puller(scope, partial(open_backend, settings=settings.transfer), paths)
    receiver = kind(holding.arenas, scope=scope, puller=puller)
    layout = single_rank(holding.layout)
    return BrokerSubscriber(
        channel, replica=replica, model_id=model_id, layout=layout, receiver=receiver, apply=apply, **hooks
    )


def _keeps(engine: EngineLoop, name: str, holding: Holding) -> Apply:
    async def apply(update: Update) -> float:
        weights = holding.weights(update.index, update.version, update.epoch)
        return await asyncio.wrap_future(engine.keep_adapter(name, weights))

    return apply
