"""Redis client with bounded waits: a restart of the server is ridden out, an absent one is an error with its name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, RedisError

from reflux_kit.errors import StartupError

_RETRIES = 20
_MAX_CONNECTIONS = 64
_WAIT_SECONDS = 10.0
_ERRORS = [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError]


class AllConnectionsBusy(redis.ConnectionError):
    """Every connection of the pool stayed in use, most likely by blocking reads: give those a client of their own."""


class _Pool(redis.asyncio.BlockingConnectionPool):
    """A full pool makes callers wait; redis-py's default pool fails them."""

    async def get_connection(self, command_name: str | None = None, *keys: Any, **options: Any) -> Any:
        try:
            return await super().get_connection()
        except redis.ConnectionError as error:
            if not isinstance(error.__cause__, TimeoutError) or self.can_get_connection():
                raise
            text = f"all {self.max_connections} connections to Redis were in use for {self.timeout:g} s"
            raise AllConnectionsBusy(text) from None


@asynccontextmanager
async def open_redis(
    url: str,
    *,
    retries: int = _RETRIES,
    max_connections: int = _MAX_CONNECTIONS,
    wait_seconds: float = _WAIT_SECONDS,
) -> AsyncIterator[redis.asyncio.Redis]:
    """Yields a client after one successful PING. Commands wait up to about 15 s for a server that restarts.

    A command may run twice when the connection breaks after the server has done it: writes must be idempotent.
    With `max_connections` in use a command waits for one, then raises `AllConnectionsBusy` after `wait_seconds`.
    """
    pool = _Pool.from_url(
        url,
        timeout=wait_seconds,
        max_connections=max_connections,
        socket_timeout=15,
        socket_connect_timeout=2,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries),
        retry_on_error=_ERRORS,
    )
    client = _cancellable(redis.asyncio.Redis.from_pool(pool))
    probe = redis.asyncio.from_url(
        url, socket_connect_timeout=2, socket_timeout=5, retry=Retry(ExponentialBackoff(0.5, 0.05), 3)
    )
    try:
        await probe.ping()
    except (RedisError, OSError) as error:
        await client.aclose()
        detail = "wrong password" if isinstance(error, AuthenticationError) else type(error).__name__
        raise StartupError(
            f"Redis at {_without_password(url)} does not answer ({detail}); set REFLUX_REDIS_URL"
        ) from None
    finally:
        await probe.aclose()
    try:
        yield client
    finally:
        await client.aclose()


class _Cancellable:
    """Before Python 3.12 `asyncio.wait_for`, in which redis-py writes, loses a cancellation that arrives as the write
    ends (cpython issue 86296); a task that only talks to Redis could then never be stopped. Remove with Python 3.11.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        asked = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)  # type: ignore[misc]
        if task and task.cancelling() > asked:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise asyncio.CancelledError


def _cancellable(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    pool = client.connection_pool
    kind = pool.connection_class
    pool.connection_class = type(f"Cancellable{kind.__name__}", (_Cancellable, kind), {})
    return client


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
