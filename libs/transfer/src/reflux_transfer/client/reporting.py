"""Tells the broker what this process measured of its transports, so that `reflux weights paths` can show it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from grpc.aio import AioRpcError, Channel

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_transfer.probe.choice import Choice
from reflux_transfer.probe.paths import PathBook, PathStatus

if TYPE_CHECKING:
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub

log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_AGAIN_SECONDS = 30.0
"""A broker that was restarted knows nothing; for people, so that half a minute is soon enough."""


@asynccontextmanager
async def reporting(
    channel: Channel, process: str, choice: Choice | None, paths: PathBook | None = None
) -> AsyncIterator[None]:
    """Reports what the self-tests found, and each change of `paths`, while the block runs."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    tested = _rows(choice) if choice else []
    paths = PathBook() if paths is None else paths
    paths.changed = lambda: _from_thread(loop, changed)
    task = asyncio.create_task(_report(WeightBrokerServiceStub(channel), process, tested, paths, changed))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _from_thread(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and a pull not at its end yet
        loop.call_soon_threadsafe(changed.set)


async def _report(
    stub: "WeightBrokerServiceAsyncStub",
    process: str,
    tested: Sequence[pb.TransferPath],
    paths: PathBook,
    changed: asyncio.Event,
) -> None:
    while True:
        changed.clear()
        request = pb.ReportPathsRequest(process=process, paths=[*tested, *map(_row, paths.statuses())])
        try:
            await stub.ReportPaths(request, timeout=_CALL_SECONDS)
        except AioRpcError as error:
            log.debug("the paths of %s are not heard of: %s", process, error.details())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _AGAIN_SECONDS)


def _rows(choice: Choice) -> list[pb.TransferPath]:
    return [
        pb.TransferPath(
            transport=status.name,
            bytes_per_second=status.bytes_per_second,
            chosen=status.name == choice.name,
            reason=f"{choice.reason}; {status.note}" if status.name == choice.name else status.note,
        )
        for status in choice.statuses
    ]


def _row(status: PathStatus) -> pb.TransferPath:
    return pb.TransferPath(
        transport=status.kind,
        peer=status.peer,
        bytes_per_second=status.bytes_per_second,
        chosen=status.ok,
        reason=status.note,
    )
