"""Entry point of the scheduler: settings in, servicer out."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from reflux.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server
from reflux_kit.errors import StartupError
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_scheduler.backends.local import LocalBackend
from reflux_scheduler.controller import Controller
from reflux_scheduler.errors import TopologyFileError
from reflux_scheduler.fleet import Fleet, Terms
from reflux_scheduler.inventory import Inventory
from reflux_scheduler.job_store import JobStore
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.servicer import SERVICE_NAME, SchedulerServicer
from reflux_scheduler.topology_file import load_topology, toy_rack


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler, REFLUX_SCHEDULER_*."""

    model_config = prefix("scheduler")

    listen: str = "127.0.0.1:7001"

    topology: str = ""
    """TOML file with the tree, configs/topologies/ has examples; empty describes this machine as a toy rack."""

    lease_seconds: float = Field(default=60.0, gt=0)
    """An agent without a scheduler stops its members after this long."""

    heartbeat_seconds: float = Field(default=2.0, gt=0)
    """How often agents report."""

    lost_margin_seconds: float = Field(default=15.0, ge=0)
    """How much longer than the lease a silent node is waited for before its jobs fail."""


@asynccontextmanager
async def build(settings: SchedulerSettings) -> AsyncIterator[Service]:
    """Owns the connection to Redis, the backend and the controller."""
    try:
        topology = load_topology(Path(settings.topology)) if settings.topology else toy_rack()
    except TopologyFileError as error:
        raise StartupError(str(error)) from None
    terms = Terms(settings.lease_seconds, settings.heartbeat_seconds, settings.lost_margin_seconds)
    fleet, inventory = Fleet(terms, time.monotonic()), Inventory(topology)
    async with open_redis(settings.redis_url) as redis, LocalBackend(fleet, settings) as backend:
        controller = Controller(JobStore(redis), inventory, fleet, backend, Metrics())
        await controller.load()
        mount = Mount(
            SchedulerServicer(controller, inventory, fleet), add_SchedulerServiceServicer_to_server, SERVICE_NAME
        )
        # Acting starts once the address is ours; knowing comes before, or agents would be told to stop everything.
        yield Service((mount,), attend=lambda _bound: controller.running())


def main() -> None:
    """Runs the scheduler until SIGTERM or SIGINT."""
    serve("scheduler", SchedulerSettings, build)


if __name__ == "__main__":
    main()
