"""Verification jobs in Redis: every change is one script (`lua/`), so a crash leaves no half-made one."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import redis.asyncio

from reflux_kit.errors import CapacityExhausted, NotFound
from reflux_sandbox.coalesce import Coalescer
from reflux_sandbox.jobs import Claimed, Job, JobEnd, JobSpec, Selector
from reflux_sandbox.reader import JobReader
from reflux_sandbox.records import to_claimed, to_creation, to_ending, to_new_job
from reflux_sandbox.script import StoreScript

PREFIX = "{sandbox}:2:"
"""The number changes with the layout of the keys: a service never reads what another layout has left."""
_PER_CALL = 250
"""Jobs that one call changes: Redis does nothing else meanwhile."""

Created = Literal["known", "queued", "cached"]


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Bounds and times of the job store."""

    most_queued: int
    """Jobs that may wait per queue; above it creation answers RESOURCE_EXHAUSTED."""
    most_bytes: int = 4 << 30
    """Payloads and answers of all jobs that have not ended."""
    lease_seconds: float
    most_attempts: int
    keep_seconds: int
    """How long an ended job can be read."""
    cache_seconds: int
    """How long the grade of an answer serves equal ones."""
    priority_seconds: float = 60.0
    """Waiting time that one unit of priority is worth: a job of any priority is the oldest some day."""
    late_seconds: float = 5.0
    """How long after its deadline a job at work is ended although its worker still keeps the lease."""


@dataclass(frozen=True)
class Claim:
    """Jobs taken from a queue and the verifier that is at its head now ("" when it is empty)."""

    head: str
    jobs: tuple[Claimed, ...]


class VerificationStore(JobReader):
    """`identity` names the service across restarts: it takes the jobs of its dead predecessor back at once.

    `watching` serves the blocking reads of `ended_jobs`, a connection each; without it they share `client`'s.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        identity: str,
        limits: StoreLimits,
        prefix: str = PREFIX,
        *,
        watching: redis.asyncio.Redis | None = None,
    ) -> None:
        super().__init__(client, watching or client, prefix)
        self._identity = identity
        self.owner = f"{identity}#{uuid.uuid4().hex[:12]}"
        self._limits = limits
        self.script = StoreScript(client, prefix)
        self._finish = Coalescer(self._finish_many)
        self.on_requeue: Callable[[], None] = lambda: None
        """Called when jobs went back to a queue."""

    @property
    def lease_seconds(self) -> float:
        return self._limits.lease_seconds

    async def create(self, spec: JobSpec) -> tuple[Created, Job]:
        """Stores a job; a known `request_id` of its run gives the first one. Raises CapacityExhausted."""
        ((how, job),) = await self.create_many([spec])
        return how, job

    async def create_many(self, specs: Sequence[JobSpec]) -> list[tuple[Created, Job]]:
        """Stores jobs in their order. Raises CapacityExhausted when a queue has no room: up to `_PER_CALL` of them are
        stored all or none, of more a part may be, which the same request ids find again."""
        created = []
        for start in range(0, len(specs), _PER_CALL):
            created += await self._create_some(specs[start : start + _PER_CALL])
        return created

    async def _create_some(self, specs: Sequence[JobSpec]) -> list[tuple[Created, Job]]:
        limits = self._limits
        payloads: dict[str, int] = {}
        rows = []
        for spec in specs:
            row = to_creation(spec, limits.priority_seconds)
            row["payload_number"] = payloads.setdefault(spec.payload, len(payloads) + 1)
            rows.append(row)
        bounds = {"most_queued": limits.most_queued, "most_bytes": limits.most_bytes}
        hows = await self.script("create", [*payloads], jobs=rows, keep_seconds=limits.keep_seconds, **bounds)
        if hows[0] == b"full":
            queue, what = hows[1].decode(), hows[2].decode()
            raise CapacityExhausted(f"{what} wait in the queue {queue} already; try again later", fidelity=queue)
        now = time.time()
        others = [row["id"] for row, how in zip(rows, hows, strict=True) if how != b"queued"]
        read = dict(zip(others, await self.get_many(others), strict=True))
        jobs = [read.get(row["id"]) or to_new_job(row, now) for row in rows]
        return [(how.decode(), job) for how, job in zip(hows, jobs, strict=True)]

    async def claim(self, queue: str, verifier: str, most: int) -> Claim:
        """Takes up to `most` jobs of one verifier (any when "") from the head of a queue, with a lease."""
        return await self.claim_for(queue, verifier, most, self.owner, self._limits.lease_seconds)

    async def claim_for(self, queue: str, verifier: str, most: int, owner: str, lease_seconds: float) -> Claim:
        head, rows = await self.script(
            "claim",
            queue=queue,
            verifier=verifier,
            most=most,
            owner=owner,
            lease_ms=round(lease_seconds * 1000),
            keep_seconds=self._limits.keep_seconds,
        )
        return Claim(head.decode(), tuple(to_claimed(row, owner) for row in rows))

    async def heartbeat(self, job_ids: Sequence[str], begun: Mapping[str, float] | None = None) -> set[str]:
        """Extends the leases; returns the jobs that are not ours any more (cancelled, or taken over).

        `begun`: those of them whose turn in their session has come, and how far each has come, 0 to 1. A death of this
        service costs them an attempt.
        """
        lease_ms = round(self._limits.lease_seconds * 1000)
        lost = await self.script(
            "heartbeat", owner=self.owner, lease_ms=lease_ms, jobs=list(job_ids), begun=begun or {}
        )
        return {job_id.decode() for job_id in lost}

    async def finish(self, end: JobEnd) -> bool:
        """Ends a job once; False when the lease was lost, then nothing has changed. Safe to repeat.

        A job of which other jobs run some answers goes on until those have a grade.
        """
        return await self._finish(end)

    async def _finish_many(self, ends: list[JobEnd]) -> list[bool]:
        limits = self._limits
        *stored, requeued = await self.script(
            "finish",
            ends=[to_ending(end) for end in ends],
            keep_seconds=limits.keep_seconds,
            cache_seconds=limits.cache_seconds,
        )
        if requeued:
            self.on_requeue()
        return [answer == 1 for answer in stored]

    async def release(self, job: Claimed, error: str, *, counted: bool, cpu_seconds: float = 0.0) -> str:
        """Gives a job back to its place in the queue, or ends it as infra_error after the last attempt.

        `counted` is False for a job that was only a neighbour of the one that failed. Returns queued, ended or lost.
        """
        answer = await self.script(
            "release",
            id=job.job_id,
            owner=job.owner,
            message=error,
            most_attempts=self._limits.most_attempts,
            failed=counted,
            cpu=cpu_seconds,
            keep_seconds=self._limits.keep_seconds,
        )
        if answer == b"queued":
            self.on_requeue()
        return answer.decode()

    async def cancel_job(self, job_id: str) -> str:
        """Cancels a job that has not ended. Returns who was at work on it ("" for nobody). Raises NotFound."""
        ended, unknown = await self._cancel([job_id], Selector(run=""))
        if unknown:
            raise NotFound(f"there is no verification {job_id!r}")
        return ended.get(job_id, "")

    async def cancel(self, selector: Selector) -> dict[str, str]:
        """Cancels the jobs of a run that `selector` means and that have not ended: who was at work on each."""
        if selector.group:
            ids = await self._redis.smembers(self._key("group", f"{selector.run}\x1f{selector.group}"))
        else:
            ids = await self._redis.zrange(self._key("live", selector.run), 0, -1)
        names = [job_id.decode() for job_id in ids]
        cancelled: dict[str, str] = {}
        for start in range(0, len(names), _PER_CALL):
            cancelled |= (await self._cancel(names[start : start + _PER_CALL], selector))[0]
        return cancelled

    async def _cancel(self, job_ids: list[str], selector: Selector) -> tuple[dict[str, str], list[bytes]]:
        ended, unknown = await self.script(
            "cancel",
            ids=job_ids,
            run=selector.run,
            group=selector.group,
            older_than=selector.older_than,
            message="cancelled on request",
            keep_seconds=self._limits.keep_seconds,
        )
        return {job_id.decode(): owner.decode() for job_id, owner in ended}, unknown

    async def set_priority(self, job_id: str, priority: float) -> bool:
        """Moves a job in its queue; False when it waits no longer. Raises NotFound."""
        head_start = round(priority * self._limits.priority_seconds * 1e6)
        answer = await self.script("prefer", id=job_id, head_start_us=head_start, priority=priority)
        if answer is None:
            raise NotFound(f"there is no verification {job_id!r}")
        return answer == 1

    async def sweep(self) -> tuple[int, int]:
        """Takes back jobs whose lease ended or whose owner was this service before a restart; ends late ones.

        Returns (taken back, ended by their deadline).
        """
        limits = self._limits
        taken, late = await self.script(
            "sweep",
            identity=self._identity,
            owner=self.owner,
            most_attempts=limits.most_attempts,
            keep_seconds=limits.keep_seconds,
            grace_ms=round(limits.late_seconds * 1000),
        )
        if taken:
            self.on_requeue()
        return int(taken), int(late)

    async def forget_dead_letter(self, job_id: str) -> bool:
        """Takes a job off the dead-letter list; False when it was not there."""
        return await self.script("forget", id=job_id) == 1
