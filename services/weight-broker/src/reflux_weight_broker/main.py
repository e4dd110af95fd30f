"""Entry point of the weight broker: settings in, servicer out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import Field

from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import add_WeightBrokerServiceServicer_to_server
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_weight_broker.coordinator import Coordinator
from reflux_weight_broker.servicer import SERVICE_NAME, WeightBrokerServicer
from reflux_weight_broker.store import VersionStore


class BrokerSettings(ServiceSettings):
    """Settings of the weight broker."""

    model_config = prefix("weight-broker")

    listen: str = "127.0.0.1:7004"
    """gRPC address to bind."""

    drain_seconds: float = Field(default=0.5, ge=0)
    """Replica streams never end by themselves, so a drain only delays a restart; callers retry what was cut."""

    reconnect_seconds: float = Field(default=2.0, ge=0)
    """How long a replica whose stream ended may take to come back before versions go on without it."""


@asynccontextmanager
async def build(settings: BrokerSettings) -> AsyncIterator[Service]:
    """Owns the Redis client and the coordinator."""
    async with open_redis(settings.redis_url) as client:
        coordinator = Coordinator(VersionStore(client), settings.reconnect_seconds)
        async with coordinator.running():
            servicer = WeightBrokerServicer(coordinator)
            yield Service((Mount(servicer, add_WeightBrokerServiceServicer_to_server, SERVICE_NAME),))


def main() -> None:
    """Console script `reflux-weight-broker`."""
    serve("weight-broker", BrokerSettings, build)


if __name__ == "__main__":
    main()
