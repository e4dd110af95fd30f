"""Entry point of `reflux-learner`: one model behind LearnerService, announced to the trainer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from reflux.trainer.v1.learner_service_pb2_grpc import add_LearnerServiceServicer_to_server
from reflux_kit.channel import open_channel
from reflux_kit.errors import StartupError
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_storage.stores.options import S3Options
from reflux_trainer.learner.backend_choice import chosen_backend
from reflux_trainer.learner.host import LearnerHost
from reflux_trainer.learner.registration import announced
from reflux_trainer.learner.servicer import SERVICE_NAME, LearnerServicer
from reflux_trainer.learner.settings import LearnerSettings
from reflux_transfer.client.reporting import reporting
from reflux_transfer.client.wire import RETRY
from reflux_transfer.probe.choice import probe


@asynccontextmanager
async def build(settings: LearnerSettings) -> AsyncIterator[Service]:
    """Owns the torch thread, the channel to the broker and the entry at the trainer."""
    if not settings.run:
        raise StartupError("REFLUX_RUN must name the run that the learner serves")
    choice = await asyncio.to_thread(probe, settings.transfer, settings.transport)
    async with (
        open_channel(settings.broker_address, settings, retry=RETRY, subject="learner") as broker,
        reporting(broker, f"learners/{settings.run}", choice),
    ):
        lost: list[str] = []
        backend = chosen_backend(settings, lost)
        host = LearnerHost(broker, settings.threads, settings.stack_secret, choice.open, backend)
        servicer = LearnerServicer(host, S3Options(endpoint=settings.s3_endpoint or None))

        def attend(bound: Bound) -> AbstractAsyncContextManager[object]:
            return announced(settings, settings.run, bound.grpc, servicer.incarnation)

        try:
            mount = Mount(servicer, add_LearnerServiceServicer_to_server, SERVICE_NAME)
            yield Service(mounts=(mount,), attend=attend)
        finally:
            await host.close()
    if lost:
        raise SystemExit(1)  # the agent starts another one, and the run goes on from its last checkpoint


def main() -> None:
    """Console script."""
    serve("learner", LearnerSettings, build)


if __name__ == "__main__":
    main()
