"""Futures in Redis: logged with their data before they are acknowledged, executed once, kept for a while when done.

Keys of an owner (a model or a sampling session) share the hash tag `{tinker:<owner>}`:
    f:<seq>    hash: digest, kind, payload and tenant while open; state, type, body or error when done
    open       sorted set of sequence numbers that are not done
    progress   the model's Progress
    log        hash: the learner's operation number -> kind and payload, until a saved state covers it
    ended:<client>  sorted set of a sampling session's futures that are done, by the order in which they ended
"""

import asyncio
import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from reflux_kit.errors import CapacityExhausted, Conflict
from reflux_trainer.queue.client import RedisClient
from reflux_trainer.tinker import metrics
from reflux_trainer.tinker.blobs import Blobs
from reflux_trainer.tinker.names import is_sampler, request_id
from reflux_trainer.tinker.records import Progress

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_OWNERS = "tinker:open"
"""Set of owners that have open futures."""

_SUBMIT = """
local known = redis.call('HGET', KEYS[1], 'digest')
if known then return known == ARGV[1] and 0 or -1 end
redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'kind', ARGV[2], 'payload', ARGV[3], 'tenant', ARGV[4], 'state', 'open')
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[5])
return 1
"""
_FINISH = """
if redis.call('HGET', KEYS[1], 'state') ~= 'open' then return 0 end
if ARGV[6] ~= '' then
  local payload = redis.call('HGET', KEYS[1], 'payload')
  redis.call('HSET', KEYS[4], ARGV[6], redis.call('HGET', KEYS[1], 'kind') .. payload)
end
redis.call('HDEL', KEYS[1], 'payload')
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'type', ARGV[3], 'body', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('ZREM', KEYS[2], ARGV[1])
if ARGV[7] ~= '' then redis.call('SET', KEYS[3], ARGV[7]) end
if ARGV[8] ~= '' then
  local last = redis.call('ZREVRANGE', KEYS[5], 0, 0, 'WITHSCORES')
  local place = math.max(tonumber(last[2] or 0), tonumber(redis.call('GET', KEYS[6]) or 0)) + 1
  redis.call('ZADD', KEYS[5], place, ARGV[8])
  redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -1 - tonumber(ARGV[9]))
  redis.call('EXPIRE', KEYS[5], ARGV[5])
  redis.call('SET', KEYS[6], place, 'EX', ARGV[5])
end
return 1
"""


_MOVE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


CLIENT = 1_000_000_000
"""Each client of a sampling session numbers its requests from its own number times this."""
_MAX_ENDED = 65_536
"""Ends that are remembered for a client that does not ask for them."""


class Reused(Conflict):
    """The sequence number belongs to another request."""


@dataclass(frozen=True)
class Outcome:
    """How a future ends."""

    body: bytes
    type: str = JSON
    failed: str = ""
    """"user" or "server" when `body` is the text of an error."""


@dataclass(frozen=True)
class Future:
    """A future as it is now."""

    tenant: str
    kind: str
    done: bool
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Ended:
    """A future of a sampling session that has ended."""

    seq_id: int
    size_bytes: int
    failed: bool

    @classmethod
    def read(cls, event: bytes) -> "Ended":
        """As the script wrote it."""
        seq_id, size, failed = event.decode().split(":")
        return cls(int(seq_id), int(size), bool(failed))


class FutureTable:
    """All futures. `await_done` wakes up when this process finishes one."""

    def __init__(self, redis: RedisClient, blobs: Blobs, *, result_seconds: int, max_pending: int) -> None:
        self._redis, self._blobs = redis, blobs
        self._result_seconds, self._max_pending = result_seconds, max_pending
        self._submit, self._finish = redis.register_script(_SUBMIT), redis.register_script(_FINISH)
        self._move = redis.register_script(_MOVE)
        self._pending: Counter[str] = Counter()
        self._done: dict[str, asyncio.Event] = {}

    async def submit(
        self,
        tenant: str,
        owner: str,
        seq_id: int,
        kind: str,
        payload: bytes,
        digest: bytes = b"",
        *,
        awaited: bool = False,
    ) -> bool:
        """Logs a request; False when it is known. `digest` is of what must not change, the payload's unless given.

        Raises `Reused` for another request of that number, `CapacityExhausted` beyond the tenant's limit, which does
        not hold for the one that is `awaited`.
        """
        if self._pending[tenant] >= self._max_pending and not awaited:
            text = f"{self._pending[tenant]} futures of this tenant are open, the limit is {self._max_pending}"
            raise CapacityExhausted(f"{text}; wait for some of them")
        sha = hashlib.sha256(kind.encode() + (digest or payload)).hexdigest()
        # Before the script: a future is never there without its owner, whatever dies in between.
        await self._redis.sadd(_OWNERS, owner)
        packed = await self._blobs.pack(owner, payload)
        keys = [_key(owner, f"f:{seq_id}"), _key(owner, "open")]
        new = int(await self._submit(keys=keys, args=[sha, kind, packed, tenant, seq_id]))
        if new <= 0:
            await self._blobs.drop_packed([packed])
        if new < 0:
            raise Reused(f"sequence number {seq_id} of {owner} belongs to another request", seq_id=str(seq_id))
        self._pending[tenant] += new
        metrics.OPEN.inc(new)
        return bool(new)

    async def payload(self, owner: str, seq_id: int) -> tuple[str, bytes] | None:
        """Kind and data of an open future."""
        kind, packed, state = await self._redis.hmget(_key(owner, f"f:{seq_id}"), ["kind", "payload", "state"])
        if packed is None or state != b"open":
            return None
        return kind.decode(), await self._blobs.unpack(packed)

    async def is_done(self, owner: str, seq_id: int) -> bool:
        """Whether a future has ended and its result is still kept."""
        state = await self._redis.hget(_key(owner, f"f:{seq_id}"), "state")
        return state not in (None, b"open")

    async def finish(
        self, owner: str, seq_id: int, outcome: Outcome, progress: Progress | None = None, op_id: int = 0
    ) -> None:
        """Records the end of a future and, in one step with it, the model's progress and logged operation `op_id`."""
        key = _key(owner, f"f:{seq_id}")
        tenant, packed = await self._redis.hmget(key, ["tenant", "payload"])
        body = await self._blobs.pack(owner, outcome.body)
        state = f"failed:{outcome.failed}" if outcome.failed else "done"
        keys = [key, *(_key(owner, name) for name in ("open", "progress", "log")), *_ended(owner, seq_id // CLIENT)]
        moved = progress.to_json() if progress else ""
        event = f"{seq_id}:{len(outcome.body)}:{outcome.failed}" if is_sampler(owner) else ""
        arguments = [seq_id, state, outcome.type, body, self._result_seconds, op_id or "", moved, event, _MAX_ENDED]
        ended = int(await self._finish(keys=keys, args=arguments))
        await self._expire_blob(body)
        if ended and tenant is not None:
            self._pending[tenant.decode()] -= 1
            metrics.OPEN.dec()
            metrics.DONE.labels(outcome.failed or "done").inc()
            if not op_id and packed is not None:
                await self._blobs.drop_packed([packed])
        for name in (request_id(owner, seq_id), _ended(owner, seq_id // CLIENT)[0]):
            if waiting := self._done.pop(name, None):
                waiting.set()

    async def _expire_blob(self, packed: bytes) -> None:
        if packed.startswith(b"@"):
            await self._redis.zadd(_EXPIRY, {packed[1:]: time.time() + self._result_seconds})

    async def get(self, owner: str, seq_id: int) -> Future | None:
        """The future, or None when it is not known (any more)."""
        raw = await self._redis.hgetall(_key(owner, f"f:{seq_id}"))
        if not raw:
            return None
        state = raw[b"state"].decode()
        tenant, kind = raw[b"tenant"].decode(), raw[b"kind"].decode()
        if state == "open":
            return Future(tenant, kind, False)
        body = await self._blobs.unpack(raw[b"body"])
        return Future(tenant, kind, True, Outcome(body, raw[b"type"].decode(), state.partition(":")[2]))

    async def await_done(self, owner: str, seq_id: int, seconds: float) -> Future | None:
        """The future when it is done, or as it is after `seconds`."""
        event = self._done.setdefault(request_id(owner, seq_id), asyncio.Event())
        found = await self.get(owner, seq_id)
        if found is None or found.done:
            self._done.pop(request_id(owner, seq_id), None)
            return found
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return found
        return await self.get(owner, seq_id)

    async def ended(self, owner: str, client: int, after: int, seconds: float) -> tuple[list[Ended], int]:
        """What ended behind `after` for one client of a sampling session, and the place of the last of it.

        What ended up to `after` is forgotten. Waits up to `seconds` for the first.
        """
        key = _ended(owner, client)[0]
        await self._redis.zremrangebyscore(key, 0, after)
        waiting = self._done.setdefault(key, asyncio.Event())
        raw = await self._redis.zrange(key, 0, -1, withscores=True)
        if not raw and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await waiting.wait()
            except TimeoutError:
                return [], after
            raw = await self._redis.zrange(key, 0, -1, withscores=True)
        return [Ended.read(event) for event, _ in raw], max([after, *(int(place) for _, place in raw)])

    async def open_seqs(self, owner: str) -> list[int]:
        """Sequence numbers that are not done, in order."""
        return [int(seq_id) for seq_id in await self._redis.zrange(_key(owner, "open"), 0, -1)]

    async def adopt(self) -> dict[str, list[int]]:
        """Open futures by owner, as an earlier process left them; counts them for their tenants."""
        found: dict[str, list[int]] = {}
        self._pending.clear()
        metrics.OPEN.set(0)
        for raw in await self._redis.smembers(_OWNERS):
            owner = raw.decode()
            seqs = await self.open_seqs(owner)
            if not seqs:
                await self._redis.srem(_OWNERS, owner)
                continue
            found[owner] = seqs
            metrics.OPEN.inc(len(seqs))
            for seq_id in seqs:
                tenant = await self._redis.hget(_key(owner, f"f:{seq_id}"), "tenant")
                self._pending[(tenant or b"").decode()] += 1
        return found

    async def progress(self, owner: str) -> Progress:
        """How far a model is."""
        raw = await self._redis.get(_key(owner, "progress"))
        return Progress.from_json(raw) if raw else Progress()

    async def move(self, owner: str, before: Progress, after: Progress) -> bool:
        """Records a new recovery state, and forgets the operations that it covers; False when others were quicker.

        A write of an earlier process that arrives late must not set a model back.
        """
        known = before.to_json() if before != Progress() else ""
        if not int(await self._move(keys=[_key(owner, "progress")], args=[known, after.to_json()])):
            return False
        covered = [op for op in await self._redis.hkeys(_key(owner, "log")) if int(op) <= after.saved_op_id]
        if covered:
            packed = await self._redis.hmget(_key(owner, "log"), covered)
            await self._redis.hdel(_key(owner, "log"), *covered)
            await self._blobs.drop_packed(each[1:] for each in packed if each)
        return True

    async def logged(self, owner: str, after: int, up_to: int) -> list[tuple[int, str, bytes]]:
        """Operations (after, up_to] with kind and data. Raises LookupError when one is gone."""
        ids = range(after + 1, up_to + 1)
        found: list[Any] = await self._redis.hmget(_key(owner, "log"), [str(op) for op in ids]) if ids else []
        missing = [op for op, raw in zip(ids, found, strict=True) if raw is None]
        if missing:
            raise LookupError(f"operations {missing[0]} to {missing[-1]} of {owner} are not in the log any more")
        return [(op, raw[:1].decode(), await self._blobs.unpack(raw[1:])) for op, raw in zip(ids, found, strict=True)]

    async def sweep(self) -> None:
        """Removes result objects whose futures have expired."""
        keys = await self._redis.zrangebyscore(_EXPIRY, 0, time.time(), start=0, num=100)
        await self._blobs.drop(key.decode() for key in keys)
        if keys:
            await self._redis.zrem(_EXPIRY, *keys)


_EXPIRY = "tinker:expiry"
"""Sorted set of objects by the Unix time at which they go."""


def _ended(owner: str, client: int) -> tuple[str, str]:
    return _key(owner, f"ended:{client}"), _key(owner, f"ended:{client}:last")


def _key(owner: str, name: str) -> str:
    return f"{{tinker:{owner}}}:{name}"
