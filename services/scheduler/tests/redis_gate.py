"""A gate between the scheduler and Redis that holds one chosen write, so that a test can kill the scheduler there.

Everything that the scheduler decides or hears is written before it is acted on. So "between this write and the next
step" and "between that step and its write" are all the moments at which a crash can matter, and holding a write makes
each of them last until the test has seen it.
"""

import asyncio
import re
from types import TracebackType
from typing import Literal, Self

_LONGEST = 4096
"""Bytes of a stream that a pattern is looked for in, across chunks."""

Side = Literal["before", "after"]


class RedisGate:
    """Forwards bytes. An armed pattern holds the first write that matches, for good: before Redis gets it, or after
    Redis has carried it out and before the scheduler hears so."""

    def __init__(self, url: str) -> None:
        address, _, self._database = url.removeprefix("redis://").partition("/")
        host, _, port = address.partition(":")
        self._upstream = (host, int(port))
        self._server: asyncio.Server | None = None
        self._pattern: re.Pattern[bytes] | None = None
        self._side: Side = "before"
        self._tasks: set[asyncio.Task[None]] = set()
        self.hit = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.release()

    @property
    def url(self) -> str:
        """Where the scheduler connects to."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._database}"

    def arm(self, pattern: bytes, side: Side) -> None:
        """The next write that matches is held; then `hit` is set."""
        self._pattern, self._side = re.compile(pattern), side
        self.hit.clear()

    async def release(self) -> None:
        """Ends all connections; what is held is never sent."""
        self._pattern = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        held = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._requests(reader, up_writer, held))
                pumps.create_task(self._replies(up_reader, writer, held))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            up_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: asyncio.Event) -> None:
        seen = b""
        while chunk := await reader.read(1 << 16):
            seen = seen[-_LONGEST:] + chunk
            if self._pattern is not None and self._pattern.search(seen):
                self._pattern, seen = None, b""
                if self._side == "before":
                    self.hit.set()
                    await asyncio.Event().wait()
                held.set()
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: asyncio.Event) -> None:
        while chunk := await reader.read(1 << 16):
            # Redis may not know the script yet: then the write comes again, in full.
            if held.is_set() and not chunk.startswith(b"-NOSCRIPT"):
                self.hit.set()
                await asyncio.Event().wait()
            writer.write(chunk)
            await writer.drain()
        raise ConnectionResetError
