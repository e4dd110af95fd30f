"""Follows the sandbox's ladders of one run into the late store, from where an earlier trainer stopped."""

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
from redis.exceptions import RedisError

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.verification_pb2 import Verification
from reflux_trainer.late.store import LateStore

if TYPE_CHECKING:
    from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceAsyncStub

log = logging.getLogger(__name__)
_RECONNECT_SECONDS = 0.3
_STALE_TOKEN = (grpc.StatusCode.INVALID_ARGUMENT,)


async def follow(stub: "LadderServiceAsyncStub", run: str, store: LateStore) -> None:
    """Stores the final rewards of every group that was released on its surrogate. Runs until it is cancelled."""
    while True:
        try:
            request = pb.WatchLaddersRequest(run=run, resume_token=await store.token())
            async for event in stub.WatchLadders(request):
                await store.settle(_final_rewards(event), event.resume_token)
        except grpc.aio.AioRpcError as error:
            level = logging.WARNING if error.code() in _STALE_TOKEN else logging.INFO
            log.log(level, "the sandbox's stream of ladders broke (%s), opening it again", error.code().name)
        except RedisError as error:
            log.warning("late rewards wait: Redis is away (%s)", type(error).__name__)
        await asyncio.sleep(_RECONNECT_SECONDS)


def _final_rewards(event: pb.WatchLaddersResponse) -> dict[int, list[float | None]]:
    """Rewards by prompt index when the event settles a group that was trained on its surrogate.

    One that was cancelled keeps what was verified until then; a forecast from a cancelled group is worth no step.
    """
    settlement = event.settlement
    if event.WhichOneof("event") != "settlement" or settlement.released_on != Verification.FIDELITY_SURROGATE:
        return {}
    samples = settlement.samples
    rewards = [sample.reward if sample.HasField("reward") and _counts(sample) else None for sample in samples]
    return {int(event.group.rpartition("/")[2]): rewards}


def _counts(sample: pb.SettledSample) -> bool:
    return sample.skipped not in ("cancelled", "stale", "budget")
