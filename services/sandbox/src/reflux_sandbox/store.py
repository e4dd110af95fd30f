"""Verification jobs in Redis: every change is one script (`verifications.lua`), so a crash leaves no half-made one."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import redis.asyncio

from reflux_kit.errors import CapacityExhausted, InvalidRequest, NotFound
from reflux_sandbox.jobs import (
    FIDELITIES,
    Claimed,
    Fidelity,
    Grade,
    Job,
    JobSpec,
    content_hash,
    grades_from_json,
    grades_to_json,
    worth_keeping,
)

PREFIX = "{sandbox}:"
_TOKEN = re.compile(r"\d{1,20}-\d{1,20}")
_BLOCK_MS = 1000

Created = Literal["known", "queued", "joined", "cached"]


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Bounds and times of the job store."""

    most_queued: int
    """Jobs that may wait per fidelity; above it CreateVerification answers RESOURCE_EXHAUSTED."""
    lease_seconds: float
    most_attempts: int
    keep_seconds: int
    """How long an ended job can be read."""
    cache_seconds: int
    """How long grades answer equal work."""


@dataclass(frozen=True)
class Claim:
    """Jobs taken from a queue and the verifier that is at its head now ("" when it is empty)."""

    head: str
    jobs: tuple[Claimed, ...]


class VerificationStore:
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
        self._redis: Any = client  # the stubs of redis-py mix sync, async, text and bytes
        self._watching: Any = watching or client
        self._identity = identity
        self._owner = f"{identity}#{uuid.uuid4().hex[:12]}"
        self._limits = limits
        self._prefix = prefix
        text = resources.files("reflux_sandbox").joinpath("verifications.lua").read_text()
        self._script = client.register_script(text)

    @property
    def lease_seconds(self) -> float:
        return self._limits.lease_seconds

    async def _call(self, operation: str, *arguments: object) -> Any:
        texts = [argument if isinstance(argument, bytes) else str(argument) for argument in arguments]
        return await self._script(keys=[self._prefix], args=[operation, *texts])

    async def create(self, spec: JobSpec, request_id: str) -> tuple[Created, Job]:
        """Stores a job; a known `request_id` gives the first one. Raises CapacityExhausted when the queue is full."""
        key = content_hash(spec)
        how, job_id = await self._call(
            "create",
            request_id,
            uuid.uuid4().hex,
            key,
            spec.fidelity,
            spec.verifier,
            spec.payload,
            json.dumps(spec.answers, separators=(",", ":")),
            len(spec.answers),
            round(spec.deadline_seconds * 1000),
            spec.run,
            spec.traceparent,
            self._limits.most_queued,
            self._limits.keep_seconds,
        )
        if how == b"full":
            raise CapacityExhausted(
                f"{job_id.decode()} jobs of fidelity {spec.fidelity} wait already; try again later",
                fidelity=spec.fidelity,
            )
        created: Created = how.decode()
        if created in ("known", "cached"):
            return created, await self.get(job_id.decode())
        return created, _waiting(job_id.decode(), spec, key)

    async def get(self, job_id: str) -> Job:
        """Reads a job. Raises NotFound when it never was, or ended longer ago than it is kept."""
        rows = await self._redis.hgetall(self._key("job", job_id))
        if not rows:
            raise NotFound(
                f"there is no verification {job_id!r}; ended ones are kept for {self._limits.keep_seconds} s"
            )
        fields = {key.decode(): value.decode() for key, value in rows.items()}
        return Job(
            job_id=job_id,
            run=fields["run"],
            verifier=fields["verifier"],
            state=fields["state"],  # type: ignore[arg-type]
            grades=grades_from_json(fields["grades"]) if "grades" in fields else (),
            attempts=int(fields["attempts"]),
            content_hash=fields["hash"],
            cached=fields.get("cached") == "1",
            error=fields.get("error", ""),
            queue_seconds=int(fields.get("queue_ms", 0)) / 1000,
            run_seconds=int(float(fields.get("run_ms", 0))) / 1000,
        )

    async def claim(self, fidelity: Fidelity, verifier: str, most: int) -> Claim:
        """Takes up to `most` jobs of one verifier (any when "") from the head of a queue, with a lease."""
        lease_ms = round(self._limits.lease_seconds * 1000)
        head, rows = await self._call("claim", fidelity, verifier, most, self._owner, lease_ms)
        return Claim(head.decode(), tuple(_claimed(row) for row in rows))

    async def heartbeat(self, job_ids: Sequence[str]) -> set[str]:
        """Extends the leases; returns the jobs that are not ours any more (cancelled, or taken over)."""
        lost = await self._call("heartbeat", self._owner, round(self._limits.lease_seconds * 1000), *job_ids)
        return {job_id.decode() for job_id in lost}

    async def finish(self, job_id: str, grades: tuple[Grade, ...], error: str = "") -> bool:
        """Ends a job once; False when the lease was lost, then nothing has changed. Safe to repeat."""
        answer = await self._call(
            "finish",
            job_id,
            self._owner,
            grades_to_json(grades),
            error,
            int(worth_keeping(grades)),
            self._limits.keep_seconds,
            self._limits.cache_seconds,
        )
        return answer == 1

    async def release(self, job_id: str, error: str, *, counted: bool) -> str:
        """Gives a job back to the front of its queue, or ends it as infra_error after the last attempt.

        `counted` is False for a job that was only a neighbour of the one that failed. Returns queued, ended or lost.
        """
        limits = self._limits
        answer = await self._call(
            "release", job_id, self._owner, error, limits.most_attempts, int(counted), limits.keep_seconds
        )
        return answer.decode()

    async def cancel(self, job_id: str) -> bool:
        """Cancels a job that has not ended. Returns whether this service was at work on it. Raises NotFound."""
        owner = await self._call("cancel", job_id, self._limits.keep_seconds)
        if owner is None:
            raise NotFound(f"there is no verification {job_id!r}")
        return owner.decode() == self._owner

    async def sweep(self) -> tuple[int, int]:
        """Takes back jobs whose lease ended or whose owner was this service before a restart; ends late ones.

        Returns (taken back, ended by their deadline in the queue).
        """
        limits = self._limits
        taken, late = await self._call("sweep", self._identity, self._owner, limits.most_attempts, limits.keep_seconds)
        return int(taken), int(late)

    async def depths(self) -> dict[Fidelity, int]:
        """Jobs that wait in each queue."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for fidelity in FIDELITIES:
                pipe.llen(self._key("queue", fidelity))
            counts = await pipe.execute()
        return dict(zip(FIDELITIES, counts, strict=True))

    async def position(self, run: str, resume_token: str) -> str:
        """Where a watcher of `run` starts: behind `resume_token`, or behind the newest ended job when it is empty."""
        if resume_token:
            if not _TOKEN.fullmatch(resume_token):
                raise InvalidRequest(f"resume_token {resume_token[:40]!r} is not one that this service gave out")
            return resume_token
        newest = await self._redis.xrevrange(self._key("ended", run), count=1)
        return newest[0][0].decode() if newest else "0-0"

    async def ended_jobs(self, run: str, position: str) -> AsyncIterator[tuple[Job, str]]:
        """Jobs of `run` as they end after `position`, each with the token to resume behind it. Endless."""
        key = self._key("ended", run)
        while True:
            streams = await self._watching.xread({key: position}, count=64, block=_BLOCK_MS)
            entries = streams[0][1] if streams else []
            ids = [fields[b"id"].decode() for _, fields in entries]
            jobs = await asyncio.gather(*(self.get(job_id) for job_id in ids), return_exceptions=True)
            for (entry_id, _), job in zip(entries, jobs, strict=True):
                position = entry_id.decode()
                if isinstance(job, Job):
                    yield job, position
                elif not isinstance(job, NotFound):  # one that is kept no longer is skipped
                    raise job

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"


def _waiting(job_id: str, spec: JobSpec, key: str) -> Job:
    """A job that was just queued, without asking Redis again."""
    return Job(
        job_id=job_id,
        run=spec.run,
        verifier=spec.verifier,
        state="queued",
        grades=(),
        attempts=0,
        content_hash=key,
        cached=False,
        error="",
        queue_seconds=0.0,
        run_seconds=0.0,
    )


def _claimed(row: list[Any]) -> Claimed:
    job_id, verifier, payload, answers, run, traceparent, attempt, left_ms = row
    return Claimed(
        job_id=job_id.decode(),
        verifier=verifier.decode(),
        payload=payload.decode(),
        answers=tuple(json.loads(answers)),
        run=run.decode(),
        traceparent=traceparent.decode(),
        attempt=int(attempt),
        seconds_left=int(left_ms) / 1000,
    )
