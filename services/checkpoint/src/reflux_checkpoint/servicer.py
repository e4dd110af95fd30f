"""The gRPC face: translates messages, delegates, holds no policy."""

import threading
from itertools import islice
from typing import Any

from prometheus_client import Counter

from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceServicer
from reflux_checkpoint.catalog import Catalog, Record
from reflux_checkpoint.manifest import CheckpointId
from reflux_checkpoint.offload import Offload
from reflux_checkpoint.parsing import parse_begin, parse_commit, parse_id, parse_list, parse_run, to_message
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.sweeper import Sweeper
from reflux_kit import telemetry
from reflux_kit.errors import NotFound

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CheckpointService"].full_name
_COMMITTED = Counter("reflux_checkpoint_committed", "Checkpoints committed")
_COMMITTED_BYTES = Counter("reflux_checkpoint_committed_bytes", "Bytes of committed checkpoints")
_DAMAGED = Counter("reflux_checkpoint_damaged_objects", "Damaged or missing objects found by scrubs on demand")


class CheckpointServicer(CheckpointServiceServicer):
    """See the service's proto."""

    def __init__(
        self, store_url: str, catalog: Catalog, protocol: CommitProtocol, sweeper: Sweeper, offload: Offload
    ) -> None:
        self._store_url = store_url
        self._catalog = catalog
        self._protocol = protocol
        self._sweeper = sweeper
        self._offload = offload

    async def BeginCheckpoint(self, request: pb.BeginCheckpointRequest, context: Any) -> pb.BeginCheckpointResponse:
        record = await self._offload.run(self._protocol.begin, parse_begin(request))
        message = to_message(record, self._store_url)
        return pb.BeginCheckpointResponse(checkpoint=message, store_url=message.store_url, prefix=message.prefix)

    async def CommitCheckpoint(self, request: pb.CommitCheckpointRequest, context: Any) -> pb.CommitCheckpointResponse:
        id, objects, cursor = parse_commit(request)
        size = sum(item.size_bytes for item in objects)
        with telemetry.span("checkpoint.commit", checkpoint=id.name, size_bytes=size):
            record = await self._offload.run(self._protocol.commit, id, objects, cursor)
        _COMMITTED.inc()
        _COMMITTED_BYTES.inc(size)
        return pb.CommitCheckpointResponse(checkpoint=to_message(record, self._store_url))

    async def AbortCheckpoint(self, request: pb.AbortCheckpointRequest, context: Any) -> pb.AbortCheckpointResponse:
        record = await self._offload.run(self._protocol.abort, parse_id(request.name))
        return pb.AbortCheckpointResponse(checkpoint=to_message(record, self._store_url))

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.GetCheckpointResponse:
        record = await self._known(parse_id(request.name))
        return pb.GetCheckpointResponse(checkpoint=to_message(record, self._store_url))

    async def GetLatestCheckpoint(
        self, request: pb.GetLatestCheckpointRequest, context: Any
    ) -> pb.GetLatestCheckpointResponse:
        run = parse_run(request.run)
        record = await self._offload.run(self._catalog.latest, run)
        if record is None:
            raise NotFound(f"run {run} has no committed checkpoint that is intact")
        return pb.GetLatestCheckpointResponse(checkpoint=to_message(record, self._store_url))

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        records, more = await self._offload.run(self._page, *parse_list(request))
        return pb.ListCheckpointsResponse(
            checkpoints=[to_message(record, self._store_url) for record in records],
            next_page_token=records[-1].id.name if more else "",
        )

    async def ScrubCheckpoint(self, request: pb.ScrubCheckpointRequest, context: Any) -> pb.ScrubCheckpointResponse:
        record = await self._known(parse_id(request.name))
        gone = threading.Event()
        try:
            damaged = await self._offload.run(self._sweeper.scrub, record, gone.is_set)
        finally:
            gone.set()  # a cancelled call stops reading
        _DAMAGED.inc(len(damaged))
        record = await self._known(record.id)
        return pb.ScrubCheckpointResponse(checkpoint=to_message(record, self._store_url), damaged_keys=damaged)

    async def _known(self, id: CheckpointId) -> Record:
        record = await self._offload.run(self._catalog.get, id)
        if record is None:
            raise NotFound(f"no checkpoint {id.name}")
        return record

    def _page(self, run: str, size: int, after: CheckpointId | None) -> tuple[list[Record], bool]:
        page = list(islice(self._catalog.newest_first(run, after), size + 1))
        return page[:size], len(page) > size
