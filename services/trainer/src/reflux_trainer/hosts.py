"""Memory of the nodes that runs may be placed on, as the scheduler knows it."""

import logging
from typing import TYPE_CHECKING

import grpc

from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_runs.memory import HostMemory

if TYPE_CHECKING:
    from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

log = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 5.0


async def host_memory(scheduler: "SchedulerServiceAsyncStub") -> HostMemory | None:
    """None when the scheduler does not answer in time or does not know a node's memory: then nothing is refused."""
    try:
        answer = await scheduler.GetTopology(pb.GetTopologyRequest(), timeout=_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        log.warning("memory is not checked, the scheduler does not tell the nodes': %s", error.details())
        return None
    sizes = [node.capacity.memory_bytes for node in answer.nodes]
    return HostMemory(max(sizes), sum(sizes)) if sizes and all(sizes) else None
