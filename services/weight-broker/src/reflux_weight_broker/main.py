"""Entry point of the weight broker: settings in, servicer out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import Field

from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import add_WeightBrokerServiceServicer_to_server
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, serve
from reflux_kit.settings import ServiceSettings, prefix
from reflux_weight_broker.coordinator import Coordinator
from reflux_weight_broker.health import Thresholds
from reflux_weight_broker.layouts import Layouts
from reflux_weight_broker.paths import Paths
from reflux_weight_broker.records import Rules
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

    join_seconds: float = Field(default=60.0, gt=0)
    """How long a late joiner may take, at least; longer when the version's own timeout is."""

    readers_per_source: int = Field(default=4, ge=0)
    """Replicas that read from the publisher, or from one replica, at a time: others wait and then read from those who
    have it. 0 sets no limit."""

    probe_threshold: float = Field(default=1e-4, gt=0)
    """Largest difference of a probe's log-prob from the learner's for weights in float32."""

    probe_threshold_narrow: float = Field(default=5e-2, gt=0)
    """The same for narrower weights."""

    def rules(self) -> Rules:
        """What the state machines go by."""
        return Rules(
            self.reconnect_seconds,
            self.join_seconds,
            self.readers_per_source,
            Thresholds(self.probe_threshold, self.probe_threshold_narrow),
        )


@asynccontextmanager
async def build(settings: BrokerSettings) -> AsyncIterator[Service]:
    """Owns the Redis client and the coordinator."""
    async with open_redis(settings.redis_url) as client:
        layouts = Layouts(client)
        coordinator = Coordinator(VersionStore(client, layouts), settings.rules())
        async with coordinator.running():
            servicer = WeightBrokerServicer(coordinator, layouts, Paths())
            yield Service((Mount(servicer, add_WeightBrokerServiceServicer_to_server, SERVICE_NAME),))


def main() -> None:
    """Console script `reflux-weight-broker`."""
    serve("weight-broker", BrokerSettings, build)


if __name__ == "__main__":
    main()
