"""Entry point of the checkpoint service: settings in, servicer out."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import add_CheckpointServiceServicer_to_server
from reflux_checkpoint.catalog import Catalog
from reflux_checkpoint.offload import Offload
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.servicer import SERVICE_NAME, CheckpointServicer
from reflux_checkpoint.settings import CheckpointSettings
from reflux_checkpoint.sweeper import Sweeper
from reflux_kit.errors import ServiceError
from reflux_kit.server import Mount, Service, serve

log = logging.getLogger(__name__)


@asynccontextmanager
async def build(settings: CheckpointSettings) -> AsyncIterator[Service]:
    """Owns the store's threads and the sweeping task."""
    store = await asyncio.to_thread(settings.usable_store)
    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog)
    sweeper = Sweeper(store, catalog, protocol, settings.sweep_policy())
    offload = Offload(settings.store_threads)
    servicer = CheckpointServicer(settings.store_url(), catalog, protocol, sweeper, offload)
    stop = threading.Event()
    sweeping = asyncio.create_task(_sweep(sweeper, offload, settings.sweep_seconds, stop))
    try:
        yield Service((Mount(servicer, add_CheckpointServiceServicer_to_server, SERVICE_NAME),))
    finally:
        stop.set()
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
        offload.close()


async def _sweep(sweeper: Sweeper, offload: Offload, pause_seconds: float, stop: threading.Event) -> None:
    while True:
        await asyncio.sleep(pause_seconds)
        try:
            await offload.run(sweeper.sweep, stop.is_set)
        except ServiceError as error:
            log.warning("sweep put off: %s", error)
        except Exception:  # task boundary: the service serves on without sweeping once
            log.exception("sweep failed")


def main() -> None:
    """Runs the service."""
    serve("checkpoint", CheckpointSettings, build)


if __name__ == "__main__":
    main()
