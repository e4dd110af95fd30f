"""Entry point of the checkpoint service: settings in, servicer out."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from pydantic import Field

from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import add_CheckpointServiceServicer_to_server
from reflux_checkpoint.catalog import Catalog
from reflux_checkpoint.offload import Offload
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.retention import RetentionPolicy
from reflux_checkpoint.servicer import SERVICE_NAME, CheckpointServicer
from reflux_checkpoint.sweeper import Sweeper, SweepPolicy
from reflux_kit.errors import ServiceError, StartupError
from reflux_kit.server import Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_storage.errors import StoreUnavailable
from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options

log = logging.getLogger(__name__)


class CheckpointSettings(ServiceSettings):
    """Settings of this service."""

    model_config = prefix("checkpoint")

    listen: str = "127.0.0.1:7006"

    keep_last: int = Field(default=3, ge=1)
    """Newest intact checkpoints of a run that are kept."""

    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none."""

    lease_seconds: float = Field(default=3600.0, gt=0)
    """An uncommitted checkpoint without any write for this long is removed."""

    sweep_seconds: float = Field(default=60.0, gt=0)
    """Pause between two sweeps (garbage, retention, one read-back per run)."""

    scrub_every_seconds: float = Field(default=86400.0, ge=0)
    """Committed checkpoints are read back when their last read-back is older; 0 never."""

    store_threads: int = Field(default=16, ge=2)
    """Store calls at once."""


def store_url(settings: ServiceSettings) -> str:
    """Address of the object store; a folder below the state folder unless one is set."""
    if settings.object_store:
        return settings.object_store
    if not settings.state_dir:
        raise StartupError("no object store: set REFLUX_OBJECT_STORE (file:///folder or s3://bucket/prefix)")
    return (Path(settings.state_dir).absolute() / "objects").as_uri()


def usable_store(url: str, s3_endpoint: str) -> ObjectStore:
    """Opens the store and asks it once; raises `StartupError` when it is away."""
    bounds = S3Options(endpoint=s3_endpoint or None, attempts=2, connect_timeout_seconds=2.0, read_timeout_seconds=10.0)
    try:
        store = open_store(url, bounds)
        store.check()
    except (ValueError, StoreUnavailable) as error:
        raise StartupError(f"the object store cannot be used: {error}") from None
    return store


@asynccontextmanager
async def build(settings: CheckpointSettings) -> AsyncIterator[Service]:
    """Owns the store's threads and the sweeping task."""
    url = store_url(settings)
    store = await asyncio.to_thread(usable_store, url, settings.s3_endpoint)
    catalog = Catalog(store)
    protocol = CommitProtocol(store, catalog)
    retention = RetentionPolicy(keep_last=settings.keep_last, keep_every_steps=settings.keep_every_steps)
    policy = SweepPolicy(
        lease_seconds=settings.lease_seconds, scrub_every_seconds=settings.scrub_every_seconds, retention=retention
    )
    sweeper = Sweeper(store, catalog, protocol, policy)
    offload = Offload(settings.store_threads)
    servicer = CheckpointServicer(url, catalog, protocol, sweeper, offload)
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
