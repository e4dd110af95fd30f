"""Jobs on an existing Ray cluster: actors with warm children of the same isolation on its nodes.

A job on Ray ends with this service: its lease runs out and it starts again. Jobs that must outlive the service go to
the `slurm` or `folder` backend.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
from typing import Any

from reflux_kit.errors import StartupError
from reflux_sandbox.execution import SessionLost
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.base import Backend, GradingSession, OpenSession
from reflux_sandbox.remote.settings import RaySettings

log = logging.getLogger(__name__)

_DRIVER = "reflux_sandbox.remote.ray_driver"
_MAX_LINE_BYTES = 64 << 20
_LEAVE_SECONDS = 10.0


class RayBackend(Backend):
    """Owns the driver process; a driver that ended is started again by the next job."""

    def __init__(self, settings: RaySettings, node: dict[str, Any]) -> None:
        self._settings = settings
        self._opening = {**settings.model_dump(exclude={"open_seconds"}), "node": node}
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._opened: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._last_line = ""

    async def start(self) -> None:
        """Starts nothing yet: a cluster may come later than this service."""
        import importlib.util

        if importlib.util.find_spec("ray") is None:
            raise StartupError("remote.ray is set, but Ray is not installed: pip install 'reflux-sandbox[ray]'")

    async def close(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await _end(process, _LEAVE_SECONDS)
        await asyncio.gather(*self._readers)

    def session(self, info: VerifierInfo) -> GradingSession:
        return RaySession(self, info)

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request on some node. Raises SessionLost."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._tell({"number": number, "request": request})
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(SessionLost):
                await self._tell({"cancel": number})
            raise
        finally:
            self._calls.pop(number, None)

    async def _start(self) -> None:
        await asyncio.gather(*self._readers)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFLUX_")}
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _DRIVER, limit=_MAX_LINE_BYTES, env=environment,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        opened = self._opened = asyncio.get_running_loop().create_future()
        self._readers = [asyncio.create_task(self._read(process)), asyncio.create_task(self._read_log(process))]
        try:
            async with asyncio.timeout(self._settings.open_seconds):
                await self._tell({"open": self._opening})
                await opened
        except TimeoutError:
            await _end(process)
            raise SessionLost(f"Ray at {self._settings.address} did not answer{self._why()}") from None
        except BaseException:  # a cancelled start must leave no driver behind
            await _end(process)
            raise

    async def _tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError:
            raise SessionLost(f"the Ray driver has ended{self._why()}") from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # a line beyond the limit: nothing to be done with such a driver
            async for line in process.stdout:
                self._hear(json.loads(line))
        await _end(process, _LEAVE_SECONDS)
        lost = SessionLost(f"the Ray driver has ended{self._why()}")
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), *([self._opened] if self._opened else [])]
        for future in waiting:
            if not future.done():
                future.set_exception(lost)

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("opened"):
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
            return
        call = self._calls.get(message["number"])
        if call is None or call.done():
            return
        if "answer" in message:
            call.set_result(message["answer"])
        else:
            call.set_exception(SessionLost(message["lost"]))

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        """Ray's own words: kept for the reason of an end, logged for those who want them."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(1 << 16):
            for line in filter(None, map(str.strip, chunk.decode(errors="replace").splitlines())):
                self._last_line = line[-300:]
                log.debug("ray driver: %s", line)

    def _why(self) -> str:
        return f"; it last wrote: {self._last_line}" if self._last_line else ""


class RaySession(OpenSession):
    """Jobs of one verifier on whatever grader is free."""

    def __init__(self, backend: RayBackend, info: VerifierInfo) -> None:
        self._backend = backend
        self._info = info

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """As in GradingSession; cancelling the call ends the work on the node."""
        return await self._backend.grade(
            {"verifier": verifier, "version": self._info.version, "payload": payload, "answers": answers}
        )


async def _end(process: asyncio.subprocess.Process, seconds: float = 0.0) -> None:
    """Waits for the end, then makes one."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
