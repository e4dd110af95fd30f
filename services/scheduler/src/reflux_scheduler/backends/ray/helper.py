"""Owns the scheduler's end of the driver process: starts it, calls it, and ends it when it does not answer.

Ray gets a process of its own because a Ray driver is no good guest: it replaces signal handlers and the logging of its
process, keeps threads that a fork must not meet, and its core ends the whole process when the head of the cluster
stays away. A call that does not answer in time costs the driver its life; the next call starts another one, which
finds everything in the cluster again.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from reflux_scheduler.backends.base import BackendAway, GrantRefused

log = logging.getLogger(__name__)

_DRIVER = "reflux_scheduler.backends.ray.driver"
_MAX_LINE_BYTES = 64 << 20
_LEAVE_SECONDS = 5.0


class DriverProcess:
    """Calls to one driver at a time; JSON lines over its stdin and stdout, which nobody else can read."""

    def __init__(self, opening: Mapping[str, Any], open_seconds: float) -> None:
        """`opening` is what each new driver is told first; its secrets never touch a command line or a file."""
        self._opening = opening
        self._open_seconds = open_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._last_line = ""

    @property
    def pid(self) -> int:
        """Of the driver that runs, 0 for none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def call(self, method: str, seconds: float, **arguments: Any) -> Any:
        """One call with its deadline. Raises BackendAway, or GrantRefused when the cluster says no."""
        async with self._starting:
            if not self.pid:
                await self._start()
        return await self._send(method, seconds, arguments)

    async def close(self) -> None:
        """Ends the driver; grants stay as they are."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await self._end(process, _LEAVE_SECONDS)
        await asyncio.gather(*self._readers)

    async def _start(self) -> None:
        await asyncio.gather(*self._readers)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _DRIVER, limit=_MAX_LINE_BYTES,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._process = process
        self._readers = [asyncio.create_task(self._read(process)), asyncio.create_task(self._read_log(process))]
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._end, process)
            await self._send("open", self._open_seconds, dict(self._opening))
            undo.pop_all()

    async def _send(self, method: str, seconds: float, arguments: Mapping[str, Any]) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise BackendAway(f"the Ray driver has ended{self._why()}")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                line = json.dumps({"number": number, "method": method, "arguments": arguments})
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
                return await answer
        except BackendAway:  # An OSError, too: the driver's own answer.
            raise
        except TimeoutError:
            await self._end(process)
            raise BackendAway(f"Ray did not answer {method} within {seconds:g} s{self._why()}") from None
        except OSError:
            raise BackendAway(f"the Ray driver has ended{self._why()}") from None
        finally:
            self._answers.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line beyond the limit: nothing to be done with such a driver
            async for line in process.stdout:
                message = json.loads(line)
                answer = self._answers.get(message["number"])
                if answer is None or answer.done():
                    continue
                if message["outcome"] == "done":
                    answer.set_result(message["value"])
                elif message["outcome"] == "refused":
                    answer.set_exception(GrantRefused(message["value"]))
                else:
                    answer.set_exception(BackendAway(message["value"]))
        await self._end(process, _LEAVE_SECONDS)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BackendAway(f"the Ray driver has ended{self._why()}"))

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        """Ray's own words: kept for the reason of an end, logged for those who want them."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            for line in filter(None, map(str.strip, chunk.decode(errors="replace").splitlines())):
                self._last_line = line[-300:]
                log.debug("driver: %s", line)

    def _why(self) -> str:
        return f"; it last wrote: {self._last_line}" if self._last_line else ""

    @staticmethod
    async def _end(process: asyncio.subprocess.Process, seconds: float = 0.0) -> None:
        """Waits for the end, then makes one: a signal to a process that has just ended would lose asyncio its code."""
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
