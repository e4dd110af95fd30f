"""What a watcher of a run sees: each job once when it ends and, when asked, running jobs as they progress."""

import time
from collections.abc import AsyncIterator

from reflux_sandbox.jobs import Job
from reflux_sandbox.reader import JobReader

_BEAT_SECONDS = 10.0
"""A running job without news is sent this often, so that a watcher can tell it from a dead one."""


async def watch(reader: JobReader, run: str, position: str, *, progress: bool) -> AsyncIterator[tuple[Job, str]]:
    """Jobs of `run` with the token to resume behind each, from `position` on. Endless."""
    seen: dict[str, tuple[object, float]] = {}
    while True:
        ended, position = await reader.ended_since(run, position)
        for job, token in ended:
            yield job, token
        if not progress:
            continue
        running = await reader.running_jobs(run)
        before, seen = seen, {}
        for job in running:
            news = (job.attempts, job.progress, len(job.partial))
            known, sent = before.get(job.job_id, (None, 0.0))
            due = news != known or time.monotonic() - sent >= _BEAT_SECONDS
            seen[job.job_id] = (news, time.monotonic() if due else sent)
            if due:
                yield job, position
