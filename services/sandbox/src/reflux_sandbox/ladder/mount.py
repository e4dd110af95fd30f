"""Puts the ladder service together on the parts of the sandbox."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from reflux.sandbox.v1.ladder_service_pb2_grpc import add_LadderServiceServicer_to_server
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.intake import Intake
from reflux_sandbox.ladder.door import JobDoor
from reflux_sandbox.ladder.ladders import Ladders
from reflux_sandbox.ladder.servicer import MOST_WATCHERS, SERVICE_NAME, LadderServicer
from reflux_sandbox.ladder.store import LadderStore
from reflux_sandbox.reader import JobReader
from reflux_sandbox.settings import SandboxSettings
from reflux_sandbox.store import PREFIX, VerificationStore

_MOST_RUNS = 64
"""Runs whose jobs are listened to at one time, a connection each; beyond them the sweep alone tells."""


@asynccontextmanager
async def open_ladders(
    settings: SandboxSettings,
    client: redis.asyncio.Redis,
    jobs: VerificationStore,
    dispatcher: Dispatcher,
    intake: Intake,
) -> AsyncIterator[Mount]:
    """Yields the service; ladders are at work until the block ends."""
    async with open_redis(settings.redis_url, max_connections=_MOST_RUNS + MOST_WATCHERS) as watching:
        store = LadderStore(client, watching, settings.keep_seconds)
        door = JobDoor(jobs, dispatcher, intake)
        async with Ladders(store, door, JobReader(client, watching, PREFIX)) as ladders:
            servicer = LadderServicer(ladders, store, door)
            yield Mount(servicer, add_LadderServiceServicer_to_server, SERVICE_NAME)
