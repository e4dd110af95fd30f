"""Runs in Redis: one record each, changed by compare-and-set together with the event that tells watchers."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from reflux_kit.errors import Conflict, NotFound
from reflux_trainer.journal import MAX_EVENTS, Event
from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import RunKeys
from reflux_trainer.queue.streams import entries_of
from reflux_trainer.records import RunRecord

_INDEX = "reflux:runs"
"""Sorted set of run ids by time of creation."""
_TRIES = 20
_SAVE = """
local current = redis.call('GET', KEYS[1]) or ''
if current == ARGV[2] then return 1 end
if current ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'e', ARGV[3])
return 1
"""


def _index_of(tenant: str) -> str:
    return f"{_INDEX}:{tenant}" if tenant else _INDEX


@dataclass(frozen=True)
class Watched:
    """One event of a run with the token behind it."""

    token: str
    event: Event
    record: RunRecord
    step: int


class RunStore:
    """All runs of one stack."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._save = redis.register_script(_SAVE)

    async def create(self, record: RunRecord) -> RunRecord:
        """Stores a new run; one that exists is returned as it is (a repeated request)."""
        for index in {_INDEX, _index_of(record.tenant)}:
            await self._redis.zadd(index, {record.run: record.created_at}, nx=True)
        await self._swap(record.run, b"", record)
        return await self.get(record.run)

    async def get(self, run: str) -> RunRecord:
        """Raises NotFound."""
        raw = await self._redis.get(RunKeys(run).record)
        if raw is None:
            raise NotFound(f"there is no run {run!r}; `reflux runs` lists them")
        return RunRecord.from_bytes(raw)

    async def knows(self, run: str) -> bool:
        """Whether there is a record of it."""
        return bool(await self._redis.exists(RunKeys(run).record))

    async def step(self, run: str) -> int:
        """Training steps that are decided."""
        return int(await self._redis.hget(RunKeys(run).cursor, "step") or 0)

    async def operation(self, run: str) -> int:
        """Last logged learner operation, warm-up included."""
        return int(await self._redis.hget(RunKeys(run).cursor, "op_id") or 0)

    async def update(self, run: str, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Applies `change` to the present record; it may run more than once. Raises NotFound, and what it raises."""
        for _ in range(_TRIES):
            raw = await self._redis.get(RunKeys(run).record)
            if raw is None:
                raise NotFound(f"there is no run {run!r}; `reflux runs` lists them")
            changed = change(RunRecord.from_bytes(raw))
            if await self._swap(run, raw, changed):
                return changed
        raise Conflict(f"run {run} changes too often; try again")

    async def _swap(self, run: str, old: bytes, new: RunRecord) -> bool:
        keys = RunKeys(run)
        arguments = [old, new.to_bytes(), Event(at=time.time()).to_json(), MAX_EVENTS]
        return bool(await self._save(keys=[keys.record, keys.events], args=arguments))

    async def page(self, size: int, before: int, tenant: str = "") -> tuple[list[RunRecord], int]:
        """Runs, of a tenant or all, from offset `before`, newest first, and the next page's offset (0 at the end)."""
        names = await self._redis.zrevrange(_index_of(tenant), before, before + size)
        return await self._records(names[:size]), before + size if len(names) > size else 0

    async def unfinished(self) -> list[RunRecord]:
        """Runs that have not ended, oldest first."""
        records = await self._records(await self._redis.zrange(_INDEX, 0, -1))
        return [record for record in records if not record.ended]

    async def _records(self, names: list[bytes]) -> list[RunRecord]:
        # A crash between the two writes of `create` leaves a name without a record.
        raw = [await self._redis.get(RunKeys(name.decode()).record) for name in names]
        return [RunRecord.from_bytes(one) for one in raw if one is not None]

    async def watch(self, run: str, token: str) -> AsyncIterator[Watched]:
        """Events behind `token` ("" is the beginning) until the run has ended and all were seen. Raises NotFound."""
        last = token or "0-0"
        while True:
            record = await self.get(run)
            entries = await self._read(run, last, 1 if record.ended else 5000)
            for entry, fields in entries:
                last = entry.decode()
                yield Watched(last, Event.from_bytes(fields[b"e"]), await self.get(run), await self.step(run))
            if record.ended and not entries:
                return

    async def _read(self, run: str, last: str, block_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        answer = await self._redis.xread({RunKeys(run).events: last}, count=200, block=block_ms)
        return entries_of(answer)
