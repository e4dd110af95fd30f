"""Opens the late rewards of one attempt, or none for a run that waits for its verifier."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal
from reflux_tasks.task import Task
from reflux_trainer.late.rewards import Corrections, LateRewards, NoLateRewards
from reflux_trainer.late.store import LateStore
from reflux_trainer.late.watch import follow
from reflux_trainer.queue.client import RedisClient

if TYPE_CHECKING:
    from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceAsyncStub


@asynccontextmanager
async def open_late_rewards(
    config: RunConfig, redis: RedisClient, ladders: "LadderServiceAsyncStub", run: str
) -> AsyncIterator[LateRewards]:
    """Yields the late rewards; final rewards are received until the block ends."""
    if config.rl.release == "full":
        yield NoLateRewards()
        return
    store = LateStore(redis, run)
    following = asyncio.create_task(follow(ladders, run, store, config.rl.samples_per_group), name="late rewards")
    try:
        yield Corrections(store, ladders, run, config.rl)
    finally:
        while not following.done():  # redis-py may swallow a cancellation that comes while it reads an answer
            following.cancel()
            await asyncio.wait([following], timeout=0.2)


def check_rungs(config: RunConfig, task: Task[Any]) -> None:
    """Raises ConfigError when a verifier of the run is of another fidelity than its rung."""
    if config.rl.release == "full":
        return
    named = {"rl.surrogate": ("surrogate", config.rl.surrogate), "rl.verifier": ("full", config.rl.verifier)}
    if config.rl.rule:
        named["rl.rule"] = ("rule", config.rl.rule)
    refusals: list[Refusal] = []
    for key, (fidelity, name) in named.items():
        verifier = task.verifiers.get(name)  # external ones are of fidelity full
        found = verifier.fidelity if verifier is not None else "full"
        if found != fidelity:
            fitting = [other for other, each in task.verifiers.items() if each.fidelity == fidelity]
            reason = f'is of fidelity {found}; release = "surrogate" needs one of fidelity {fidelity} here'
            refusals.append(Refusal(key, name, reason, " or ".join(f'"{each}"' for each in fitting) or "another task"))
    if refusals:
        raise ConfigError(tuple(refusals))
