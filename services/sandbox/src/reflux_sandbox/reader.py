"""Reads of the job store: jobs, pages of jobs, the stream of ended ones, dead letters, reports."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio

from reflux_kit.errors import InvalidRequest, NotFound, WrongState
from reflux_sandbox.jobs import FIDELITIES, REMOTE, Job
from reflux_sandbox.records import distinct_numbers, to_job
from reflux_sandbox.report import Report, to_report

_TOKEN = re.compile(r"\d{1,20}-\d{1,20}")
_PAGE = re.compile(r"(live:\d{1,9})|(ended:(\d{1,20}-\d{1,20})?)")
_BLOCK_MS = 1000
_PER_READ = 256


class JobReader:
    """`watching` serves the blocking reads of `ended_jobs`, a connection each."""

    def __init__(self, client: redis.asyncio.Redis, watching: redis.asyncio.Redis, prefix: str) -> None:
        self._redis: Any = client  # the stubs of redis-py mix sync, async, text and bytes
        self._watching: Any = watching
        self._prefix = prefix

    async def get(self, job_id: str) -> Job:
        """Reads a job. Raises NotFound when it never was, or ended longer ago than it is kept."""
        (job,) = await self.get_many([job_id])
        if job is None:
            raise NotFound(f"there is no verification {job_id!r}; ended ones are kept for a while only")
        return job

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Reads jobs; None for one that never was or is kept no longer."""
        if not job_ids:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hgetall(self._key("job", job_id))
            rows = await pipe.execute()
        now = time.time()
        return [to_job(job_id, row, now) if row else None for job_id, row in zip(job_ids, rows, strict=True)]

    async def content(self, job_id: str) -> tuple[str, list[str]]:
        """Payload, and an answer for each answer of the job, equal to it at least. Raises NotFound, and WrongState when
        neither is kept: only jobs that have not ended and dead letters have their content."""
        await self.get(job_id)
        row = await self._redis.hgetall(self._key("job", job_id))
        text = await self._redis.hget(self._key("payload", row.get(b"payload", b"?").decode()), "text")
        if text is None:
            raise WrongState(f"the content of verification {job_id} is not kept: it ended, and is no dead letter")
        distinct = json.loads(row[b"answers"])
        return text.decode(), [distinct[number] for number in distinct_numbers(row)]

    async def list_jobs(self, run: str, page_token: str, most: int, *, ended: bool | None) -> tuple[list[Job], str]:
        """A page of a run's jobs and the token of the next ("" at the end): those that have not ended, oldest first,
        then the ended ones, newest first. `ended` keeps only one kind. Raises InvalidRequest for a strange token."""
        token = page_token or ("ended:" if ended else "live:0")
        if not _PAGE.fullmatch(token):
            raise InvalidRequest(f"page_token {page_token[:40]!r} is not one that this service gave out")
        kind, _, place = token.partition(":")
        if kind == "live":
            ids = await self._redis.zrange(self._key("live", run), int(place), int(place) + most - 1)
            following = f"live:{int(place) + most}" if len(ids) == most else ("" if ended is False else "ended:")
        else:
            entries = await self._redis.xrevrange(self._key("ended", run), f"({place}" if place else "+", count=most)
            ids = [fields[b"id"] for _, fields in entries]
            following = f"ended:{entries[-1][0].decode()}" if len(entries) == most else ""
        jobs = await self.get_many([job_id.decode() for job_id in ids])
        return [job for job in jobs if job is not None], following

    async def running_jobs(self, run: str) -> list[Job]:
        """Jobs of a run that are at work now."""
        ids = [job_id.decode() for job_id in await self._redis.zrange(self._key("running", ""), 0, -1)]
        jobs = await self.get_many(ids)
        return [job for job in jobs if job is not None and job.run == run and job.state == "running"]

    async def position(self, run: str, resume_token: str) -> str:
        """Where a watcher of `run` starts: behind `resume_token`, or behind the newest ended job when it is empty."""
        if resume_token:
            if not _TOKEN.fullmatch(resume_token):
                raise InvalidRequest(f"resume_token {resume_token[:40]!r} is not one that this service gave out")
            return resume_token
        newest = await self._redis.xrevrange(self._key("ended", run), count=1)
        return newest[0][0].decode() if newest else "0-0"

    async def ended_since(self, run: str, position: str, wait_ms: int = _BLOCK_MS) -> tuple[list[tuple[Job, str]], str]:
        """Jobs of `run` that ended after `position`, each with the token to resume behind it, and the token behind all
        of them; waits for the first."""
        streams = await self._watching.xread({self._key("ended", run): position}, count=_PER_READ, block=wait_ms)
        entries = streams[0][1] if streams else []
        jobs = await self.get_many([fields[b"id"].decode() for _, fields in entries])
        tokens = [token.decode() for token, _ in entries]
        found = [(job, token) for job, token in zip(jobs, tokens, strict=True) if job and job.state == "ended"]
        return found, tokens[-1] if tokens else position

    async def ended_jobs(self, run: str, position: str) -> AsyncIterator[tuple[Job, str]]:
        """Jobs of `run` as they end after `position`, each with the token to resume behind it. Endless."""
        while True:
            found, position = await self.ended_since(run, position)
            for each in found:
                yield each

    async def depths(self) -> dict[str, int]:
        """Jobs that wait, by fidelity and for other places."""
        names = [*FIDELITIES, REMOTE]
        counts = await asyncio.gather(*(self._redis.zcard(self._key("queue", name)) for name in names))
        return dict(zip(names, counts, strict=True))

    async def dead_letters(self, run: str, start: int, most: int) -> tuple[list[Job], int]:
        """Jobs that nothing could grade, newest first, those of `run` unless it is ""; where the next page starts, or
        -1 at the end."""
        ids = await self._redis.zrevrange(self._key("dead", ""), start, start + most - 1)
        jobs = await self.get_many([job_id.decode() for job_id in ids])
        following = start + most if len(ids) == most else -1
        return [job for job in jobs if job is not None and run in ("", job.run)], following

    async def dead_letter_count(self) -> int:
        return await self._redis.zcard(self._key("dead", ""))

    async def reuse(self) -> dict[str, int]:
        """Answers of all runs that were executed, and that were equal to one that was."""
        return {how.decode(): int(count) for how, count in (await self._redis.hgetall(self._key("reuse", ""))).items()}

    async def report(self, run: str) -> Report:
        """What became of the answers of a run in the last week."""
        return to_report(await self._redis.hgetall(self._key("report", run)))

    async def suspicious_runs(self, most: int = 32) -> list[str]:
        """Of the runs that were at work last, those whose timeouts go with the length of answers."""
        runs = [run.decode() for run in await self._redis.zrevrange(self._key("runs", ""), 0, most - 1)]
        reports = await asyncio.gather(*(self.report(run) for run in runs))
        return [run for run, report in zip(runs, reports, strict=True) if report.lengths.suspicious]

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}" if name else f"{self._prefix}{kind}"
