"""The gRPC face of the gateway: translates messages, delegates, holds no policy."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceServicer
from reflux_inference_gateway import metrics
from reflux_inference_gateway.answers import Batch, aborted, generated_tokens, one_by_one, whole_group
from reflux_inference_gateway.clients import ReplicaClients
from reflux_inference_gateway.dispatch import Dispatcher, GivenUp, Share
from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.routing.base import Ask
from reflux_inference_gateway.want import Want
from reflux_inference_gateway.wire import (
    GroupCall,
    parse_group,
    parse_replica,
    parse_replica_name,
    parse_request_id,
    replica_message,
)
from reflux_kit import telemetry
from reflux_kit.errors import NotFound

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceGatewayService"].full_name
_NO_DEADLINE_SECONDS = 24 * 3600.0


@dataclass(eq=False)
class _Running:
    """A group that a caller waits for: the replicas that have parts of it now, and whether somebody aborted it."""

    clients: list[ReplicaClient] = field(default_factory=list)
    aborted: bool = False


class InferenceGatewayServicer(InferenceGatewayServiceServicer):
    """Generation, registration and the fleet."""

    def __init__(self, dispatcher: Dispatcher, clients: ReplicaClients, heartbeat_seconds: float) -> None:
        self._dispatcher = dispatcher
        self._clients = clients
        self._heartbeat_seconds = heartbeat_seconds
        self._running: dict[str, list[_Running]] = {}

    async def GenerateGroup(
        self, request: pb.GenerateGroupRequest, context: Any
    ) -> AsyncIterator[pb.GenerateGroupResponse]:
        call = parse_group(request)
        running = _Running()
        # A caller that lost its connection may repeat the call before the first one is seen to be gone.
        self._running.setdefault(call.request_id, []).append(running)
        batches: list[Batch] = []
        try:
            with telemetry.span("gateway.generate_group", samples=call.num_samples, model=call.model_id) as span:
                async with aclosing(self._batches(call, running, context)) as finished:
                    async for batch in finished:
                        batches.append(batch)
                        if not call.whole_group:
                            for response in one_by_one(batch):
                                yield response
                span.set_attribute("replicas", sorted({replica for replica, _ in batches}))
            if call.whole_group:
                for response in whole_group(batches):
                    yield response
        finally:
            self._running[call.request_id].remove(running)
            if not self._running[call.request_id]:
                del self._running[call.request_id]

    async def _batches(self, call: GroupCall, running: _Running, context: Any) -> AsyncGenerator[Batch, None]:
        """Finished samples as they come; what was aborted while it waited for a replica comes last, without tokens."""
        want = self._want(call, running, context)
        missing = set(range(call.num_samples))
        try:
            async with aclosing(self._dispatcher.stream_group(want, self._sender(call, running, context))) as batches:
                async for replica, samples in batches:
                    metrics.count_samples(call.model_id, samples)
                    missing.difference_update(sample.index for sample in samples)
                    yield replica, samples
        except GivenUp:
            yield "", aborted(sorted(missing))

    def _want(self, call: GroupCall, running: _Running, context: Any) -> Want:
        remaining = context.time_remaining()
        version = self._dispatcher.table.newest_version(call.model_id) if call.version is None else call.version
        return Want(
            model_id=call.model_id,
            num_tokens=call.num_tokens,
            min_version=call.min_version,
            max_lag=call.max_lag,
            version=call.version,
            session=call.session,
            ask=Ask(
                num_samples=call.num_samples,
                prompt=call.prompt_token_ids,
                num_prompt_tokens=len(call.prompt_token_ids),
                max_tokens=call.sampling.max_tokens,
                session=call.session,
                run=call.model_id,
                salt=str(version),
            ),
            deadline_seconds=_NO_DEADLINE_SECONDS if remaining is None else remaining,
            given_up=lambda: running.aborted,
        )

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        found = tuple(self._running.get(parse_request_id(request.request_id), ()))
        for running in found:
            running.aborted = True
            for client in tuple(running.clients):
                await client.abort(request.request_id)
        self._dispatcher.changes.notify()
        return pb.AbortResponse(found=bool(found))

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
        self._dispatcher.changes.notify()
        return pb.DeregisterReplicaResponse(replica=replica_message(entry))

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        entries = self._dispatcher.table.entries(request.model_id)
        return pb.ListReplicasResponse(replicas=[replica_message(entry) for entry in entries])

    async def PauseFleet(self, request: pb.PauseFleetRequest, context: Any) -> pb.PauseFleetResponse:
        running = self._dispatcher.fleet.pause(request.model_id)
        self._dispatcher.changes.notify()
        return pb.PauseFleetResponse(running=running)

    async def ResumeFleet(self, request: pb.ResumeFleetRequest, context: Any) -> pb.ResumeFleetResponse:
        released = self._dispatcher.fleet.resume(request.model_id)
        self._dispatcher.changes.notify()
        return pb.ResumeFleetResponse(released=released)

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
        )

    def _sender(
        self, call: GroupCall, running: _Running, context: Any
    ) -> Callable[[Replica, Share], AsyncGenerator[Batch, None]]:
        async def send(replica: Replica, share: Share) -> AsyncGenerator[Batch, None]:
            client = self._clients.get(replica.info)
            running.clients.append(client)
            try:
                part = call if share.count == call.num_samples else call.share(share.first, share.count)
                samples_of = client.generate(part, context.time_remaining(), replica.version)
                async with aclosing(samples_of) as batches:
                    async for samples in batches:
                        self._dispatcher.finished(share, len(samples), generated_tokens(samples))
                        yield replica.info.name, samples
            finally:
                running.clients.remove(client)

        return send
