"""How much longer than the ideal list schedule do 1,000 verifications take that wait, 200 of them at one time?

The waits are log-normal (median 1 s, sigma 1.2) between 0.05 and 20 s: instruments, remote clusters, slow engines. They
run on a place outside the machine (`reflux_sandbox.remote`), one that sleeps, so that what is measured is all the rest:
the queue in a real Valkey (appendfsync always), claims, leases, heartbeats, results. The ideal list schedule gives the
jobs in the order of the queue, each to the first of 200 slots that is free, at no cost. The clock runs from the start
of the dispatcher until the last job has ended in the store. Median of the rounds, each with draws of its own.

Last line: one JSON object.
"""

import asyncio
import heapq
import json
import random
import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import redis.asyncio
import stack

from reflux_sandbox.dispatcher import Dispatcher, DispatchLimits
from reflux_sandbox.isolation.base import Isolation, Tier, VerifierInfo
from reflux_sandbox.isolation.handle import ChildHandle
from reflux_sandbox.jobs import REMOTE, JobSpec
from reflux_sandbox.remote.base import Backend, GradingSession
from reflux_sandbox.store import StoreLimits, VerificationStore

ROUNDS, JOBS, SLOTS = 3, 1000, 200
SHORTEST, LONGEST, SIGMA = 0.05, 20.0, 1.2
WAITS = VerifierInfo("bench/waits", "1", "full", trusted=False, cost_seconds=1.0)
LIMITS = StoreLimits(most_queued=10_000, lease_seconds=6.0, most_attempts=3, keep_seconds=600, cache_seconds=600)


class NoChildren(Isolation):
    """Nothing runs on this machine."""

    name = "prefork"
    tier = Tier.PREFORK

    @property
    def reasons(self) -> list[str]:
        """Nothing to say."""
        return []

    @property
    def verifiers(self) -> list[VerifierInfo]:
        """None."""
        return []

    @property
    def idle_children(self) -> int:
        """None."""
        return 0

    @property
    def busy_children(self) -> int:
        """None."""
        return 0

    async def start(self) -> None:
        """Nothing to start."""

    async def acquire(self, family: str = "") -> ChildHandle:
        """Never called."""
        raise OSError("there are no children")

    async def close(self) -> None:
        """Nothing to close."""


class Sleep:
    """A session whose job takes as long as its answer says."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """Sleeps."""
        await asyncio.sleep(float(answers[0]))
        return {"grades": [{"outcome": "scored", "reward": 1.0, "figures": {}, "message": ""}], "cpu_seconds": 0.0}


class Instruments(Backend):
    """A place that only waits."""

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def session(self, info: VerifierInfo) -> GradingSession:
        """A sleeping one."""
        return Sleep()


def draws(seed: int) -> list[float]:
    """Waits in seconds, no two equal."""
    dice = random.Random(seed)
    waits = [min(LONGEST, max(SHORTEST, dice.lognormvariate(0.0, SIGMA))) for _ in range(JOBS)]
    return [wait - dice.random() * 1e-6 for wait in waits]


def ideal(waits: Sequence[float]) -> float:
    """Length of the list schedule in the given order."""
    slots = [0.0] * SLOTS
    for wait in waits:
        heapq.heapreplace(slots, slots[0] + wait)
    return max(slots)


def _spec(wait: float, run: str) -> JobSpec:
    return JobSpec(
        verifier=WAITS.name,
        version=WAITS.version,
        fidelity=WAITS.fidelity,
        queue=REMOTE,
        payload="{}",
        answers=(repr(wait),),
        deadline_seconds=600.0,
        run=run,
        traceparent="",
    )


async def measured(url: str, waits: Sequence[float], run: str) -> float:
    """Seconds from the start of the dispatcher until all jobs have ended."""
    async with redis.asyncio.from_url(url) as client:
        store = VerificationStore(client, run, LIMITS, f"{{{run}}}:")
        specs = [_spec(wait, run) for wait in waits]
        await store.create_many(specs)
        position, place, left = await store.position(run, ""), Instruments(), JOBS
        limits = DispatchLimits(
            concurrency={"rule": 1, "surrogate": 1, "full": 1},
            remote_concurrency=SLOTS,
            batch_jobs=1,
            batch_seconds=0.0,
            memory_bytes=1 << 28,
        )
        start = time.perf_counter()
        async with Dispatcher(store, NoChildren(), limits, route=lambda _: place, elsewhere=[WAITS]):
            async for ended, _ in store.ended_jobs(run, position):
                assert ended.grades[0].outcome == "scored", ended
                left -= 1
                if not left:
                    break
            return time.perf_counter() - start


async def main() -> None:
    """Prints the figures."""
    overheads = []
    async with stack.open_valkey() as url:
        for seed in range(ROUNDS):
            waits = draws(seed)
            seconds, best = await measured(url, waits, f"round-{seed}"), ideal(waits)
            overheads.append(seconds / best - 1)
            print(f"seed {seed}: {seconds:.2f} s, ideal {best:.2f} s, overhead {overheads[-1]:.4f}")
    print(json.dumps({"schedule_overhead": round(statistics.median(overheads), 4)}))


if __name__ == "__main__":
    asyncio.run(main())
