"""Keeps a foreign engine at the broker's committed version, and notices when it is gone or was restarted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import ClassVar

from reflux_inference_gateway.foreign.base import EngineFailed, WeightSink
from reflux_inference_gateway.foreign.metrics import PAUSE, SERVED
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings
from reflux_transfer.client.offer import Offer, Prepared, Update
from reflux_transfer.client.receiver import Apply, Receiver
from reflux_transfer.client.reporting import reporting
from reflux_transfer.client.subscriber import BrokerSubscriber
from reflux_transfer.client.wire import RETRY
from reflux_transfer.modes import Mode
from reflux_transfer.probe.paths import PathBook
from reflux_weightplan.spec import SpecLayout

log = logging.getLogger(__name__)

_LOST_AFTER = 3
"""So many questions in a row without an answer, and the engine counts as gone."""


class Follower(Receiver):
    """One engine's side of the broker's protocol; hands everything on to the sink. Nobody can read from it."""

    mode: ClassVar[Mode] = "swap"

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink
        self._committing = asyncio.Lock()
        self.announce: Callable[[], None] = lambda: None
        """Called after each commit, so that requests that wait for the version are routed at once."""

        self.version = 0
        self.epoch = 0
        """What the engine serves; 0 before the first commit."""

    async def prepare(self, offer: Offer, cancelled: Callable[[], bool]) -> Prepared:
        report = await self._sink.receive(offer, cancelled)
        took = report.bytes, report.seconds, report.fingerprint
        log.info("received epoch %d: %d bytes in %.3f s, fingerprint %016x", offer.epoch, *took)
        return Prepared(offer.version, offer.epoch, report, report.fingerprint)

    async def commit(self, prepared: Prepared, apply: Apply) -> tuple[Prepared, float]:
        # The bytes are with the engine, not here.
        return prepared, await apply(Update(prepared.version, prepared.epoch, 0, memoryview(b"")))

    async def close(self) -> None:
        """The sink is whose it was."""
        return

    async def apply(self, update: Update) -> float:
        """For `BrokerSubscriber`: a COMMIT; returns the pause in milliseconds."""
        async with self._committing:
            pause_ms = await _to_its_end(self._sink.commit(update.version, update.epoch))
            self.version, self.epoch = update.version, update.epoch
        PAUSE.observe(pause_ms / 1000)
        SERVED.set(update.version)
        log.info("the engine serves version %d (epoch %d), paused for %.0f ms", update.version, update.epoch, pause_ms)
        self.announce()
        return pause_ms

    async def watch(self, period_seconds: float) -> str:
        """Asks the engine from time to time; returns why it cannot be a replica any more.

        An engine that was restarted serves its folder's weights again: routed to, it would answer as a version that it
        is not.
        """
        silent = 0
        while True:
            await asyncio.sleep(period_seconds)
            async with self._committing:
                try:
                    served, silent = await self._sink.version(), 0
                except EngineFailed as error:
                    silent += 1
                    if silent >= _LOST_AFTER:
                        return f"the engine is gone: {error}"
                    continue
                if self.epoch and served != str(self.version):
                    return f"the engine serves version {served!r} instead of {self.version}: it was restarted"


async def _to_its_end(commit: Coroutine[None, None, float]) -> float:
    """Awaits a commit even when this process is asked to stop: an engine must not be left paused."""
    task = asyncio.create_task(commit)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@asynccontextmanager
async def following(
    settings: ServiceSettings,
    model_id: str,
    replica: str,
    layout: SpecLayout,
    follower: Follower,
    paths: PathBook,
    watch_seconds: float,
    fatal: Callable[[str], None],
) -> AsyncIterator[None]:
    """Follows broker and engine while the block runs; `fatal` when either of them makes going on pointless."""
    async with (
        open_channel(settings.broker_address, settings, retry=RETRY, subject="engine-adapter") as channel,
        reporting(channel, replica, None, paths),
    ):
        subscriber = BrokerSubscriber(
            channel,
            replica=replica,
            model_id=model_id,
            layout=layout,
            receiver=follower,
            apply=follower.apply,
        )

        async def ends() -> None:
            tasks = [asyncio.create_task(subscriber.run()), asyncio.create_task(follower.watch(watch_seconds))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                (first, *_) = done
                fatal(str(first.exception() or first.result()))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        task = asyncio.create_task(ends())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
