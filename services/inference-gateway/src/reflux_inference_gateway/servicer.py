"""The gRPC face of the gateway: translates messages, delegates, holds no policy."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceServicer
from reflux_inference_gateway.answers import Batch, one_by_one, whole_group
from reflux_inference_gateway.clients import ReplicaClients
from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.generation import Generations
from reflux_inference_gateway.prefill_legs import PrefillLegs
from reflux_inference_gateway.traffic_wire import parse_traffic, traffic_message
from reflux_inference_gateway.wire import (
    ledger_message,
    parse_abort,
    parse_group,
    parse_lease,
    parse_replica,
    parse_replica_name,
    replica_message,
)
from reflux_kit import telemetry
from reflux_kit.errors import NotFound

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceGatewayService"].full_name


class InferenceGatewayServicer(InferenceGatewayServiceServicer):
    """Generation, registration and the fleet."""

    def __init__(
        self, dispatcher: Dispatcher, clients: ReplicaClients, legs: PrefillLegs, heartbeat_seconds: float
    ) -> None:
        self._dispatcher = dispatcher
        self._generations = Generations(dispatcher, clients, legs)
        self._heartbeat_seconds = heartbeat_seconds

    async def GenerateGroup(
        self, request: pb.GenerateGroupRequest, context: Any
    ) -> AsyncIterator[pb.GenerateGroupResponse]:
        call = parse_group(request)
        batches: list[Batch] = []
        replicas: set[str] = set()
        with (
            self._generations.new(call, context.time_remaining) as generation,
            telemetry.span("gateway.generate_group", samples=call.num_samples, model=call.model_id) as span,
        ):
            async with aclosing(generation.batches()) as finished:
                async for batch in finished:
                    replicas.add(batch[0])
                    if call.whole_group:
                        batches.append(batch)
                        continue
                    for response in one_by_one(batch):
                        yield response
            span.set_attribute("replicas", " ".join(sorted(replicas)))
        if call.whole_group:
            for response in whole_group(batches):
                yield response

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        count = await self._generations.abort(**parse_abort(request))
        return pb.AbortResponse(found=count > 0, num_requests=count)

    async def RegisterReplica(self, request: pb.RegisterReplicaRequest, context: Any) -> pb.RegisterReplicaResponse:
        dispatcher = self._dispatcher
        entry = dispatcher.table.register(parse_replica(request.replica), dispatcher.clock())
        dispatcher.forget(entry.info.name)
        dispatcher.changes.notify()
        return pb.RegisterReplicaResponse(replica=replica_message(entry), heartbeat_seconds=self._heartbeat_seconds)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        dispatcher = self._dispatcher
        info = parse_replica(request.replica)
        before = dispatcher.table.get(info.name)
        was = None if before is None else (before.state, before.info.version, before.info.fault)
        known = dispatcher.table.heartbeat(info, dispatcher.clock())
        after = dispatcher.table.get(info.name)
        dispatcher.verdicts.reported(info)
        if after is not None and was != (after.state, after.info.version, after.info.fault):
            dispatcher.changes.notify()
        return pb.HeartbeatResponse(register_again=not known)

    async def DeregisterReplica(
        self, request: pb.DeregisterReplicaRequest, context: Any
    ) -> pb.DeregisterReplicaResponse:
        name = parse_replica_name(request.name)
        table = self._dispatcher.table
        if table.get(name) is None:
            raise NotFound(f"{name} is not registered", name=name)
        entry = table.drain(name)
        if entry.inflight_requests == 0:
            table.remove(name)
            self._dispatcher.forget(name)
        self._dispatcher.changes.notify()
        return pb.DeregisterReplicaResponse(replica=replica_message(entry))

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        entries = self._dispatcher.table.entries(request.model_id)
        return pb.ListReplicasResponse(replicas=[replica_message(entry) for entry in entries])

    async def PauseFleet(self, request: pb.PauseFleetRequest, context: Any) -> pb.PauseFleetResponse:
        fleet = self._dispatcher.fleet
        if request.mode == request.MODE_BEGINNINGS:
            seconds = parse_lease(request.lease_seconds)
            fleet.hold_back(request.model_id, seconds)
            if seconds < math.inf:  # whoever waits looks again when it is over
                asyncio.get_running_loop().call_later(seconds + 0.01, self._dispatcher.changes.notify)
        else:
            fleet.pause(request.model_id, park=request.mode == request.MODE_PARTIAL)
        self._dispatcher.changes.notify()
        if request.mode == request.MODE_PARTIAL:
            await self._generations.park(request.model_id)
        return pb.PauseFleetResponse(running=fleet.running(request.model_id), ledger=ledger_message(fleet.ledger))

    async def ResumeFleet(self, request: pb.ResumeFleetRequest, context: Any) -> pb.ResumeFleetResponse:
        fleet = self._dispatcher.fleet
        begins = request.mode == pb.PauseFleetRequest.MODE_BEGINNINGS
        released = fleet.let_begin(request.model_id) if begins else fleet.resume(request.model_id)
        self._dispatcher.changes.notify()
        return pb.ResumeFleetResponse(released=released, ledger=ledger_message(fleet.ledger))

    async def SetTraffic(self, request: pb.SetTrafficRequest, context: Any) -> pb.SetTrafficResponse:
        division = parse_traffic(request)
        model_id, divisions = request.traffic.model_id, self._dispatcher.verdicts.divisions
        if division is None:
            divisions.pop(model_id, None)
        else:
            divisions[model_id] = division
        self._dispatcher.changes.notify()
        return pb.SetTrafficResponse(traffic=traffic_message(model_id, division))

    async def WatchFleet(self, request: pb.WatchFleetRequest, context: Any) -> AsyncIterator[pb.WatchFleetResponse]:
        last = None
        while True:
            changed = self._dispatcher.changes.upcoming()
            now = self._fleet_now()
            if now != last:
                yield now
            last = now
            await changed.wait()

    def _fleet_now(self) -> pb.WatchFleetResponse:
        return pb.WatchFleetResponse(
            replicas=[replica_message(entry) for entry in self._dispatcher.table.entries()],
            paused_models=self._dispatcher.fleet.paused_models(),
            held_back_models=self._dispatcher.fleet.held_back_models(),
            traffic=[traffic_message(*item) for item in sorted(self._dispatcher.verdicts.divisions.items())],
        )
