"""Follows the sandbox's ladders of one run into the late store, from where an earlier trainer stopped."""

import asyncio
import logging
import re
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
_REPAIR_SECONDS = 5.0
_GROUP = re.compile(r"prompt/(0|[1-9][0-9]{0,17})")
"""Group of a training prompt, as the rollout workers name it."""
_STALE_TOKEN = (grpc.StatusCode.INVALID_ARGUMENT,)


async def follow(stub: "LadderServiceAsyncStub", run: str, store: LateStore, samples: int) -> None:
    """Stores the final rewards of every group of `samples` answers that was released on its surrogate.

    Runs until it is cancelled: nobody awaits its end, so that whatever goes wrong is logged and tried again.
    """
    while True:
        try:
            request = pb.WatchLaddersRequest(run=run, resume_token=await store.token())
            async for event in stub.WatchLadders(request):
                await store.settle(_final_rewards(event, run, samples), event.resume_token)
        except grpc.aio.AioRpcError as error:
            level = logging.WARNING if error.code() in _STALE_TOKEN else logging.INFO
            log.log(level, "the sandbox's stream of ladders broke (%s), opening it again", error.code().name)
        except RedisError as error:
            log.warning("late rewards wait: Redis is away (%s)", type(error).__name__)
        except Exception as error:  # task boundary
            log.error("late rewards of %s stand still, following them again", run, exc_info=error)
            await asyncio.sleep(_REPAIR_SECONDS)
        await asyncio.sleep(_RECONNECT_SECONDS)


def _final_rewards(event: pb.WatchLaddersResponse, run: str, samples: int) -> dict[int, list[float | None]]:
    """Rewards by prompt index when the event settles a group that was trained on its surrogate.

    Anybody may put groups on the ladder for a run; only the worker's own, by group and sample ids, are the trainer's.
    One that was cancelled keeps what was verified until then; a forecast from a cancelled group is worth no step.
    """
    settlement, found = event.settlement, _GROUP.fullmatch(event.group)
    if event.WhichOneof("event") != "settlement" or settlement.released_on != Verification.FIDELITY_SURROGATE:
        return {}
    if found is None:
        return {}
    index = int(found[1])
    if [sample.sample_id for sample in settlement.samples] != [f"{run}/{index}/{number}" for number in range(samples)]:
        return {}
    known = [sample.HasField("reward") and _counts(sample) for sample in settlement.samples]
    return {index: [each.reward if it else None for each, it in zip(settlement.samples, known, strict=True)]}


def _counts(sample: pb.SettledSample) -> bool:
    return sample.skipped not in ("cancelled", "stale", "budget")
