"""Entry point of `reflux-learner`: one model behind LearnerService, announced to the trainer."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from reflux.trainer.v1.learner_service_pb2_grpc import add_LearnerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_storage.stores.options import S3Options
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.registration import announced
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer
from reflux_trainer.learner.settings import LearnerSettings
from reflux_transfer.client.wire import RETRY
from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.probe import probe

log = logging.getLogger(__name__)


@asynccontextmanager
async def build(settings: LearnerSettings) -> AsyncIterator[Service]:
    """Owns the torch thread, the channel to the broker and the entry at the trainer."""
    if not settings.run:
        raise StartupError("REFLUX_RUN must name the run that the learner serves")
    await _probe_transfer()
    async with open_channel(settings.broker_address, settings, retry=RETRY, subject="learner") as broker:
        host = LearnerHost(broker, settings.threads)
        servicer = LearnerServicer(host, S3Options(endpoint=settings.s3_endpoint or None))

        def attend(bound: Bound) -> AbstractAsyncContextManager[object]:
            return announced(settings, settings.run, bound.grpc, servicer.incarnation)

        try:
            mount = Mount(servicer, add_LearnerServiceServicer_to_server, SERVICE_NAME)
            yield Service(mounts=(mount,), attend=attend)
        finally:
            await host.close()


async def _probe_transfer() -> None:
    """Logs which transports this host has; without any the learner starts all the same and its first publish fails."""
    try:
        await asyncio.to_thread(probe)
    except BackendUnavailable as error:
        log.error("%s", error)


def main() -> None:
    """Console script."""
    serve("learner", LearnerSettings, build)


if __name__ == "__main__":
    main()
