"""Entry point of a rollout worker: `python -m reflux_trainer.rollout.main`."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceStub
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import NotFound, StartupError
from reflux_kit.redis import open_redis
from reflux_kit.server import Service, serve
from reflux_tasks.registry import UnknownTask
from reflux_trainer.clients.generation import Generator
from reflux_trainer.clients.ladders import open_ladders
from reflux_trainer.clients.verification import open_verifications
from reflux_trainer.codec import Codec
from reflux_trainer.folder import model_folder
from reflux_trainer.problems import rungs_of
from reflux_trainer.queue.prompts import PromptQueue
from reflux_trainer.rollout.settings import RolloutSettings
from reflux_trainer.rollout.worker import Worker
from reflux_trainer.shared import served_model
from reflux_trainer.store import RunStore

log = logging.getLogger(__name__)


@asynccontextmanager
async def build(settings: RolloutSettings) -> AsyncIterator[Service]:
    """Owns the connections and the worker's task; a worker that ends takes the process down, its agent restarts it."""
    if not settings.run:
        raise StartupError("REFLUX_RUN must name the run to work for")
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(open_redis(settings.redis_url))
        try:
            record = await RunStore(redis).get(settings.run)
            codec = Codec.of_run(record.config, model_folder(record.config, Path(record.folder)))
        except (NotFound, FileNotFoundError, ValueError, UnknownTask) as error:
            raise StartupError(str(error)) from None
        gateway = await stack.enter_async_context(open_channel(settings.gateway_address, settings, subject="rollout"))
        sandbox = await stack.enter_async_context(open_channel(settings.sandbox_address, settings, subject="rollout"))
        stops = [] if codec.end_id is None else [codec.end_id]
        stub, served = InferenceGatewayServiceStub(gateway), served_model(settings.run, record.config)
        ladders = None
        if (rungs := rungs_of(record.config)) is not None:
            ladders = await stack.enter_async_context(open_ladders(LadderServiceStub(sandbox), settings.run, rungs))
        worker = Worker(
            PromptQueue(redis, settings.run, f"worker-{settings.rank}-{uuid4().hex[:8]}"),
            Generator(stub, served, max_tokens=record.config.rl.max_tokens, stop_token_ids=stops),
            await stack.enter_async_context(open_verifications(SandboxServiceStub(sandbox), settings.run)),
            codec,
            record.config,
            settings,
            ladders,
        )
        working = asyncio.create_task(worker.run(), name="rollout worker")
        working.add_done_callback(_ended)
        try:
            yield Service(mounts=())
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.error("the rollout worker ended", exc_info=task.exception())
        logging.shutdown()
        os._exit(1)  # not SIGTERM: status 0 would tell the agent that the work is done


def main() -> None:
    """Console script reflux-rollout."""
    serve("rollout", RolloutSettings, build)


if __name__ == "__main__":
    main()
