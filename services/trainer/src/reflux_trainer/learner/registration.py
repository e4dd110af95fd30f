"""The learner's entry at the trainer: announced every few seconds, for as long as the process serves."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from grpc.aio import AioRpcError

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings

if TYPE_CHECKING:
    from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

log = logging.getLogger(__name__)

_CALL_SECONDS = 3.0
_RETRY_SECONDS = 0.5


@asynccontextmanager
async def announced(settings: ServiceSettings, run: str, address: str, incarnation: str) -> AsyncIterator[None]:
    """Keeps the entry alive until the block ends; a trainer that is away is retried for ever."""
    async with open_channel(settings.trainer_address, settings, subject="learner") as channel:
        stub = TrainerServiceStub(channel)
        request = pb.RegisterLearnerRequest(run=run, address=address, incarnation=incarnation)
        task = asyncio.create_task(_keep(stub, settings.trainer_address, request))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _keep(stub: "TrainerServiceAsyncStub", trainer: str, request: pb.RegisterLearnerRequest) -> None:
    known: bool | None = None
    while True:
        try:
            answer = await stub.RegisterLearner(request, timeout=_CALL_SECONDS)
            pause = max(0.05, answer.heartbeat_seconds)
            if not known:
                log.info("announced to the trainer at %s as learner of %s", trainer, request.run)
            known = True
        except AioRpcError as error:
            if known is not False:
                log.warning("the trainer at %s does not answer: %s %s", trainer, error.code().name, error.details())
            known, pause = False, _RETRY_SECONDS
        await asyncio.sleep(pause)
