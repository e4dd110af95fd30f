"""Follows the weight broker: new versions are pulled into the arenas and become current between decode steps."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from grpc.aio import Channel

from reflux_inference_gateway.engine.holding import Holding
from reflux_inference_gateway.engine.lanes import OWN
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.replica import Description
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.channel import open_channel
from reflux_transfer.client.in_place import InPlaceReceiver
from reflux_transfer.client.layouts import single_rank
from reflux_transfer.client.offer import Update
from reflux_transfer.client.puller import Puller
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
        self,
        engine: EngineLoop,
        holding: Holding,
        description: Description,
        announce: Callable[[], None],
        model: str = OWN,
    ) -> None:
        """`announce` is called after each commit, so that requests that wait for the version are routed at once, and
        whenever the replica's health may have changed. `model` is the engine's name of what it follows.
        """
        self.holding, self._model = holding, model
        self._engine, self._description, self._announce = engine, description, announce

    async def apply(self, update: Update) -> float:
        """Serves an update; see `Apply` of `reflux_transfer.client.receiver`."""
        weights = self.holding.weights(update.index, update.version, update.epoch)
        try:
            return await asyncio.wrap_future(self._engine.swap(weights, update.fill, self._model))
        finally:
            self._announce()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Scores the probe prompt."""
        return (await asyncio.wrap_future(self._engine.score(token_ids, self._model))).logprobs

    def judged(self, fault: str) -> None:
        """The broker has compared the scores with the learner's."""
        if fault:
            log.error("this replica is unhealthy: %s", fault)
        self._description.fault = fault
        self._announce()


class BrokerLink:
    """Owns what all subscriptions of this process share: the channel, and what is known of paths to peers."""

    def __init__(self, settings: EngineSettings, channel: Channel, paths: PathBook) -> None:
        self._settings, self._channel, self._paths = settings, channel, paths

    @asynccontextmanager
    async def following(
        self, model_id: str, replica: str, follower: Follower, fatal: Callable[[str], None]
    ) -> AsyncIterator[None]:
        """Keeps the engine at a model's committed versions while the block runs.

        `fatal` is called when the broker refuses the replica (another layout): it would serve old weights for ever.
        """
        task = asyncio.create_task(self._subscriber(model_id, replica, follower).run())

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                fatal(f"the weight broker refuses this replica: {error}")

        task.add_done_callback(ended)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _subscriber(self, model_id: str, replica: str, follower: Follower) -> BrokerSubscriber:
        holding, transfer = follower.holding, self._settings.transfer
        kind = SwapReceiver if holding.mode.mode == "swap" else InPlaceReceiver
        scope = scope_of(model_id, self._settings.stack_secret)
        puller = Puller(scope, partial(open_backend, settings=transfer), self._paths)
        return BrokerSubscriber(
            self._channel,
            replica=replica,
            model_id=model_id,
            layout=single_rank(holding.layout),
            receiver=kind(holding.arenas, scope=scope, puller=puller),
            apply=follower.apply,
            probe=follower.score,
            judged=follower.judged,
        )


@asynccontextmanager
async def broker_link(settings: EngineSettings, replica: str, choice: Choice) -> AsyncIterator[BrokerLink]:
    """Opens the link and reports what the self-test said of the transports."""
    paths = PathBook(settings.transfer)
    async with (
        open_channel(settings.broker_address, settings, retry=RETRY, subject="engine") as channel,
        reporting(channel, replica, choice, paths),
    ):
        yield BrokerLink(settings, channel, paths)
