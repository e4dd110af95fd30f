"""The gRPC face of the ladders: translates messages, delegates, holds no policy."""

from collections.abc import AsyncIterator
from typing import Any

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceServicer
from reflux_kit import telemetry
from reflux_kit.errors import CapacityExhausted
from reflux_sandbox.creation import parse_policy_version
from reflux_sandbox.ladder.door import JobDoor
from reflux_sandbox.ladder.ladders import Ladders
from reflux_sandbox.ladder.messages import parse_ladder, parse_ladder_name, to_calibration, to_ladder
from reflux_sandbox.ladder.store import LadderStore
from reflux_sandbox.messages import parse_run

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["LadderService"].full_name
MOST_WATCHERS = 32
"""Each holds a connection to Redis while it waits."""
_WAIT_MS = 1000


class LadderServicer(LadderServiceServicer):
    """See ladder_service.proto."""

    def __init__(self, ladders: Ladders, store: LadderStore, door: JobDoor) -> None:
        self._ladders = ladders
        self._store = store
        self._door = door
        self._watchers = 0

    async def CreateLadder(self, request: pb.CreateLadderRequest, context: Any) -> pb.CreateLadderResponse:
        if not request.traceparent:
            request.traceparent = telemetry.traceparent()
        stored = await self._ladders.create(await parse_ladder(request, self._door))
        return pb.CreateLadderResponse(ladder=to_ladder(stored.spec, stored.state))

    async def GetLadder(self, request: pb.GetLadderRequest, context: Any) -> pb.GetLadderResponse:
        stored = await self._store.load(parse_ladder_name(request.name))
        return pb.GetLadderResponse(ladder=to_ladder(stored.spec, stored.state))

    async def WatchLadders(
        self, request: pb.WatchLaddersRequest, context: Any
    ) -> AsyncIterator[pb.WatchLaddersResponse]:
        run = parse_run(request.run)
        if self._watchers >= MOST_WATCHERS:
            raise CapacityExhausted(f"{self._watchers} streams are open already; watch a run with one stream")
        self._watchers += 1
        try:
            position = await self._store.position(run, request.resume_token)
            # The headers tell the client that nothing which happens from here on is missed.
            await context.send_initial_metadata((("resume-token", position),))
            while True:
                for token, raw in await self._store.events(run, position, _WAIT_MS):
                    position = token
                    event = pb.WatchLaddersResponse.FromString(raw)
                    event.resume_token = token
                    yield event
        finally:
            self._watchers -= 1

    async def CancelLadder(self, request: pb.CancelLadderRequest, context: Any) -> pb.CancelLadderResponse:
        ladder_id = parse_ladder_name(request.name)
        await self._ladders.cancel(ladder_id)
        stored = await self._store.load(ladder_id)
        return pb.CancelLadderResponse(ladder=to_ladder(stored.spec, stored.state))

    async def CancelLadders(self, request: pb.CancelLaddersRequest, context: Any) -> pb.CancelLaddersResponse:
        older_than = parse_policy_version(request.older_than_policy_version)
        return pb.CancelLaddersResponse(cancelled=await self._ladders.cancel_run(parse_run(request.run), older_than))

    async def GetCalibration(self, request: pb.GetCalibrationRequest, context: Any) -> pb.GetCalibrationResponse:
        run = parse_run(request.run)
        return to_calibration(run, await self._ladders.runs.get(run))
