"""Owns the scheduler's keys in Redis: jobs, their order, and which request made which job.

All keys share the hash tag {scheduler}, so that one transaction can touch them on a Redis cluster.
"""

from pydantic import TypeAdapter
from redis.asyncio import Redis

from reflux_scheduler.job import Job

_REQUEST_SECONDS = 86400
"""A request id is remembered for one day (the proto says so)."""

_ORDER = "{scheduler}:jobs"
_job_codec: TypeAdapter[Job] = TypeAdapter(Job)


class JobStore:
    """Jobs as JSON, written as a whole. Writes are idempotent: the client may repeat one after a broken connection."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def load(self) -> list[Job]:
        """All stored jobs, oldest first."""
        ids = [_text(raw) for raw in await self._redis.zrange(_ORDER, 0, -1)]
        values = await self._redis.mget([_job_key(job_id) for job_id in ids]) if ids else []
        return [_job_codec.validate_json(value) for value in values if value is not None]

    async def by_request(self, request_id: str) -> str | None:
        """Id of the job that a request made before."""
        raw = await self._redis.get(_request_key(request_id))
        return _text(raw) if raw is not None else None

    async def create(self, job: Job, request_id: str) -> None:
        """Stores a new job together with its request id."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.set(_job_key(job.id), _job_codec.dump_json(job))
            transaction.zadd(_ORDER, {job.id: job.number})
            transaction.set(_request_key(request_id), job.id, ex=_REQUEST_SECONDS)
            await transaction.execute()

    async def save(self, job: Job) -> None:
        """Stores a changed job."""
        await self._redis.set(_job_key(job.id), _job_codec.dump_json(job))

    async def forget(self, job: Job) -> None:
        """Drops a finished job."""
        async with self._redis.pipeline(transaction=True) as transaction:
            transaction.delete(_job_key(job.id))
            transaction.zrem(_ORDER, job.id)
            await transaction.execute()


def _text(raw: object) -> str:
    assert isinstance(raw, bytes), "the kit opens Redis without decoding"
    return raw.decode()


def _job_key(job_id: str) -> str:
    return f"{{scheduler}}:job:{job_id}"


def _request_key(request_id: str) -> str:
    return f"{{scheduler}}:request:{request_id}"
