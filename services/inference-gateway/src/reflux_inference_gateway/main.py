"""Entry point of the gateway: settings in, both doors out."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import (
    add_InferenceGatewayServiceServicer_to_server,
)
from reflux_inference_gateway import metrics
from reflux_inference_gateway.clients import ReplicaClients
from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.http.service import openai_service
from reflux_inference_gateway.prefill_legs import PrefillLegs
from reflux_inference_gateway.replicas import ReplicaTable
from reflux_inference_gateway.routing import POLICIES
from reflux_inference_gateway.routing.pairing import Pairing
from reflux_inference_gateway.servicer import SERVICE_NAME, InferenceGatewayServicer
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.server import Mount, Service, serve

log = logging.getLogger(__name__)


@asynccontextmanager
async def build(settings: GatewaySettings) -> AsyncIterator[Service]:
    """Owns the gateway's state, its connections to replicas and the task that ages the table."""
    dispatcher = Dispatcher(
        table=ReplicaTable(expiry_seconds=settings.replica_expiry_seconds),
        fleet=Fleet(max_held=settings.max_held_requests),
        new_policy=POLICIES[settings.routing],
        replica_wait_seconds=settings.replica_wait_seconds,
        full_at_capacities=settings.full_at_capacities,
        tenant_weights=settings.tenant_weights,
    )
    metrics.observe_fleet(dispatcher.fleet)
    clients = ReplicaClients(settings)
    ageing = asyncio.create_task(_age(dispatcher, clients, settings))
    try:
        pairing = Pairing(settings.remote_prefill_tokens, settings.far_prefill_tokens)
        legs = PrefillLegs(dispatcher, clients, pairing, settings.remote_prefill_seconds)
        servicer = InferenceGatewayServicer(dispatcher, clients, legs, settings.heartbeat_seconds)
        mount = Mount(servicer, add_InferenceGatewayServiceServicer_to_server, SERVICE_NAME)
        yield Service((mount,), openai_service(dispatcher, settings))
    finally:
        ageing.cancel()
        await clients.close()


async def _age(dispatcher: Dispatcher, clients: ReplicaClients, settings: GatewaySettings) -> None:
    """Takes silent replicas out of routing, forgets drained and long-lost ones, writes the gauges.

    A round that comes late judges nobody: this process stood still itself, and heartbeats wait unread in its sockets.
    """
    period_seconds = settings.heartbeat_seconds / 2
    while True:
        planned = dispatcher.clock() + period_seconds
        await asyncio.sleep(period_seconds)
        if dispatcher.clock() - planned > settings.heartbeat_seconds:
            continue
        changed = dispatcher.table.expire(dispatcher.clock())
        if changed:
            log.warning("no heartbeat from %s", ", ".join(changed))
            dispatcher.changes.notify()
        for name in changed:
            if dispatcher.table.get(name) is None:
                dispatcher.forget(name)
        for name in dispatcher.table.silent(dispatcher.clock() - settings.replica_abandon_seconds):
            dispatcher.abandon(name)
        await clients.forget_all_but({entry.info.name for entry in dispatcher.table.entries()})
        metrics.observe_replicas(dispatcher.table)
        metrics.observe_verdicts(dispatcher.verdicts, dispatcher.clock())


def main() -> None:
    """Runs the gateway until SIGTERM."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    gc.freeze()  # What the imports left is never garbage; looking through it stops all requests for tens of ms.
    serve("inference-gateway", GatewaySettings, build)


if __name__ == "__main__":
    main()
