"""The services that the trainer calls: one channel each, for all runs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceStub
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_kit.channel import open_channel
from reflux_trainer.checkpointing import METHODS
from reflux_trainer.learners import LearnerRegistry
from reflux_trainer.queue.client import RedisClient
from reflux_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceAsyncStub
    from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceAsyncStub
    from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceAsyncStub
    from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceAsyncStub
    from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub
    from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceAsyncStub


@dataclass(frozen=True)
class Peers:
    """Everything outside the trainer."""

    redis: RedisClient
    scheduler: "SchedulerServiceAsyncStub"
    gateway: "InferenceGatewayServiceAsyncStub"
    broker: "WeightBrokerServiceAsyncStub"
    sandbox: "SandboxServiceAsyncStub"
    ladders: "LadderServiceAsyncStub"
    checkpoint: "CheckpointServiceAsyncStub"
    learners: LearnerRegistry
    settings: TrainerSettings


@asynccontextmanager
async def open_peers(redis: RedisClient, settings: TrainerSettings) -> AsyncIterator[Peers]:
    """Yields the peers; their processes need not be up yet."""
    async with AsyncExitStack() as stack:

        async def channel(address: str, retry: tuple[str, ...] = ()) -> grpc.aio.Channel:
            return await stack.enter_async_context(open_channel(address, settings, retry=retry, subject="trainer"))

        scheduler = ("GetJob", "CreateJob", "CancelJob", "ExplainJob", "MarkJobSaved")
        sandbox = await channel(settings.sandbox_address)
        yield Peers(
            redis=redis,
            scheduler=SchedulerServiceStub(
                await channel(
                    settings.scheduler_address, tuple(f"reflux.scheduler.v1.SchedulerService/{it}" for it in scheduler)
                )
            ),
            gateway=InferenceGatewayServiceStub(await channel(settings.gateway_address)),
            broker=WeightBrokerServiceStub(await channel(settings.broker_address)),
            sandbox=SandboxServiceStub(sandbox),
            ladders=LadderServiceStub(sandbox),
            checkpoint=CheckpointServiceStub(await channel(settings.checkpoint_address, METHODS)),
            learners=LearnerRegistry(),
            settings=settings,
        )
