"""Owns the leader's lease in Redis: one scheduler acts, another takes over when the lease has run out.

The key holds "{term} {address} {identity}" and expires. A term is a fencing token: the time in milliseconds, or one
more than the last one, so that it grows even when Redis was emptied. Every write to the store compares the key, and
agents refuse calls of a lower term than they have seen. A scheduler that comes back at its own address takes its lease
over at once: it has bound the address, so the process that held it is gone.

A leader that cannot reach Redis does not know whether somebody else leads by now. When it knew of another one that
waits, it stops at the end of its lease; else it answers agents for `alone_seconds` more, so that members outlive an
absent Redis. It may be wrong then (the other one may have come meanwhile), and agents that it answers do not turn away.
So whoever leads after another scheduler (`successor`) counts no agent's silence for that long.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from reflux_scheduler.errors import NotLeading
from reflux_scheduler.store import LEADER, STILL_MINE, TERM

log = logging.getLogger(__name__)

_STANDBY = "{scheduler}:standby"
_LAST = "{scheduler}:last-leader"
_RENEWALS = 3
_RESIGN_SECONDS = 1.0
_WAIT_SECONDS = 5.0
"""How long a call waits for a scheduler that is about to lead."""

_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  local identity = string.match(held, '^%d+ %S* (.*)$')
  if identity ~= ARGV[2] then
    redis.call('SET', KEYS[3], ARGV[1], 'PX', 3 * ARGV[3])
    return {held, ''}
  end
end
local now = redis.call('TIME')
local term = math.max(now[1] * 1000 + math.floor(now[2] / 1000), (redis.call('GET', KEYS[2]) or 0) + 1)
redis.call('SET', KEYS[2], string.format('%.0f', term))
local mine = string.format('%.0f', term) .. ' ' .. ARGV[1] .. ' ' .. ARGV[2]
local last = redis.call('GET', KEYS[4]) or ARGV[2]
redis.call('SET', KEYS[4], ARGV[2])
redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
return {mine, last}
"""
_RENEW = f"""
{STILL_MINE}
if held ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1 + redis.call('EXISTS', KEYS[3])
"""
_RESIGN = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class Lease:
    """A parsed value of the leader key."""

    term: int
    address: str
    identity: str

    @classmethod
    def parse(cls, value: bytes) -> "Lease":
        """The lease in a value of the key."""
        term, address, identity = value.decode().split(" ", 2)
        return cls(int(term), address, identity)


class Leadership:
    """One candidate. `reign` runs as long as it leads; it is cancelled when the lease is lost."""

    def __init__(
        self, redis: Redis, address: str, identity: str, lease_seconds: float, alone_seconds: float = 0.0
    ) -> None:
        self._redis = redis
        self._address = address
        self._identity = identity
        self._lease_seconds = lease_seconds
        self._alone_seconds = alone_seconds
        self._value = ""
        self._expires = 0.0
        self._changed = asyncio.Event()
        self.other = ""
        """Address of the scheduler that leads instead."""

        self.term = 0
        """Term of this scheduler while it leads, else 0."""

        self.ready = False
        """It leads and knows what the last leader knew."""

        self.successor = False
        """Another scheduler led before this one, and may not know yet that it leads no more."""

        self._rival = False
        """Another scheduler waits for the lease."""

    @property
    def holds(self) -> bool:
        """Whether this scheduler leads by its own clock: until the lease is over, and for `alone_seconds` more when
        nobody else was known to wait for it."""
        alone = 0.0 if self._rival else self._alone_seconds
        return self.term > 0 and time.monotonic() < self._expires + alone

    async def leading(self) -> None:
        """Returns when this scheduler leads and is ready; waits a little when it is about to. Raises NotLeading."""
        if self.ready and self.holds:
            return
        end = time.monotonic() + _WAIT_SECONDS
        while not (self.ready and self.holds):
            if self.other or time.monotonic() > end:
                raise NotLeading(self.other)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await self._changed.wait()

    def set_ready(self) -> None:
        """Calls may be answered from now on."""
        self.ready = True
        self._changed.set()

    @contextlib.asynccontextmanager
    async def campaigning(self, reign: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
        """Tries to lead until the block ends; `reign(lease value)` runs whenever this scheduler leads."""
        task = asyncio.create_task(self._campaign(reign), name="leadership")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._resign()

    async def _campaign(self, reign: Callable[[str], Awaitable[None]]) -> None:
        while True:
            try:
                if await self._acquire():
                    await self._reign(reign)
            except RedisError as error:
                log.warning("no lease: Redis does not answer (%s)", type(error).__name__)
            except Exception:  # task boundary: a reign that failed ends, the next one starts from the store
                log.exception("leading failed")
            finally:
                self.term, self.ready = 0, False
            await asyncio.sleep(self._lease_seconds / _RENEWALS)

    async def _acquire(self) -> bool:
        asked = time.monotonic()
        millis = int(self._lease_seconds * 1000)
        keys = (LEADER, TERM, _STANDBY, _LAST)
        raw, last = await self._redis.eval(_ACQUIRE, 4, *keys, self._address, self._identity, millis)  # pyright: ignore[reportGeneralTypeIssues]
        lease = Lease.parse(raw)
        if lease.identity != self._identity:
            if self.other != lease.address:
                log.info("the scheduler at %s leads; waiting for its lease to end", lease.address)
            self.other = lease.address
            self._changed.set()
            return False
        self._value, self._expires = raw.decode(), asked + self._lease_seconds
        self.term, self.other, self._rival = lease.term, "", False
        self.successor = last.decode() != self._identity
        log.info("leading with term %d", lease.term)
        return True

    async def _reign(self, reign: Callable[[str], Awaitable[None]]) -> None:
        ruling = asyncio.ensure_future(reign(self._value))
        keeping = asyncio.create_task(self._keep(), name="keep lease")
        try:
            await asyncio.wait((ruling, keeping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ready = False
            for task in (ruling, keeping):
                task.cancel()
            outcomes = await asyncio.gather(ruling, keeping, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, NotLeading):
                raise outcome
        log.warning("this scheduler does not lead any more")

    async def _keep(self) -> None:
        """Renews until somebody else has the lease. While Redis is absent `holds` says what may be done; when it comes
        back and nobody else has led meanwhile, the lease goes on.
        """
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS)
            asked = time.monotonic()
            try:
                millis = int(self._lease_seconds * 1000)
                answer = await self._redis.eval(_RENEW, 3, LEADER, TERM, _STANDBY, self._value, millis)  # pyright: ignore[reportGeneralTypeIssues]
            except RedisError as error:
                log.warning("the lease cannot be renewed: Redis does not answer (%s)", type(error).__name__)
                continue
            if not answer:
                return
            self._rival = answer > 1
            self._expires = asked + self._lease_seconds
            self._changed.set()

    async def _resign(self) -> None:
        """Lets the next scheduler lead at once."""
        if self._value:
            with contextlib.suppress(RedisError, TimeoutError):
                async with asyncio.timeout(_RESIGN_SECONDS):
                    await self._redis.eval(_RESIGN, 1, LEADER, self._value)  # pyright: ignore[reportGeneralTypeIssues]
