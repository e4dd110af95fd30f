"""All sessions of this process: how many there may be, who asked for them, and how those ended that are gone."""

import asyncio
import uuid
from collections import OrderedDict
from types import TracebackType
from typing import Self

from reflux_kit.errors import CapacityExhausted, NotFound, Unavailable
from reflux_sandbox import metrics
from reflux_sandbox.code_runner import refuse_weak
from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.sessions.caps import SessionCaps
from reflux_sandbox.sessions.session import Session, SessionLimits, gone

_REMEMBERED = 1024
"""Ended sessions whose cause can be asked for."""
_ACQUIRE_SECONDS = 60.0


class Sessions:
    """Use as a context manager; leaving it ends them all. They live in this process only."""

    def __init__(self, isolation: Isolation, caps: SessionCaps) -> None:
        self._isolation = isolation
        self._caps = caps
        self._living: dict[str, Session] = {}
        self._runs: dict[str, str] = {}
        """Session -> run, for those that live or start."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._by_request: dict[str, asyncio.Task[Session]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        starting = [task for task in self._by_request.values() if not task.done()]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(session.end("the service stopped") for session in list(self._living.values())))

    async def create(self, request_id: str, run: str, limits: SessionLimits) -> Session:
        """A ready session. The same request gets the same one while it lives.

        Raises WrongState on a weak tier, CapacityExhausted above the caps, Unavailable when no child comes up.
        """
        refuse_weak(self._isolation)
        if (task := self._by_request.get(request_id)) is None:
            self._check_caps(run)
            name = f"sessions/{uuid.uuid4().hex}"
            self._runs[name] = run
            task = asyncio.create_task(self._start(request_id, name, run, limits))
            self._by_request[request_id] = task
        return await asyncio.shield(task)

    def _check_caps(self, run: str) -> None:
        of_run = sum(other == run for other in self._runs.values())
        if of_run >= self._caps.most_per_run:
            raise CapacityExhausted(f"run {run} has {of_run} sessions already; close one", run=run)
        if len(self._runs) >= self._caps.most:
            raise CapacityExhausted(f"there are {len(self._runs)} sessions already; try again later")

    async def _start(self, request_id: str, name: str, run: str, limits: SessionLimits) -> Session:
        child = None
        try:
            async with asyncio.timeout(_ACQUIRE_SECONDS):
                child = await self._isolation.acquire()
            session = Session(name, run, child, limits, lambda why: self._forget(request_id, name, why))
            await session.make_ready()
        except BaseException as error:  # a cancelled start must not leak its child
            self._forget(request_id, name, "it never became ready")
            if child is not None:
                await child.end()
            if isinstance(error, TimeoutError | ConnectionError):
                raise Unavailable(f"no child became ready for a session: {error or 'too slow'}") from error
            raise
        self._living[name] = session
        metrics.OPEN_SESSIONS.set(len(self._living))
        return session

    def _forget(self, request_id: str, name: str, why: str) -> None:
        self._living.pop(name, None)
        self._runs.pop(name, None)
        self._by_request.pop(request_id, None)
        self._ended[name] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        metrics.OPEN_SESSIONS.set(len(self._living))
        metrics.ENDED_SESSIONS.labels(why.partition(":")[0]).inc()

    def get(self, name: str) -> Session:
        """Raises NotFound, with the cause for one that has ended not long ago."""
        if (session := self._living.get(name)) is not None:
            return session
        if (why := self._ended.get(name)) is not None:
            raise gone(name, why)
        raise NotFound(f"there is no {name}: it ended long ago, or the service has restarted since", cause="unknown")

    async def close(self, name: str) -> None:
        """Ends a session; one that has ended is left alone. Raises NotFound for one that nobody knows."""
        if name in self._living:
            await self._living[name].end("closed")
        elif name not in self._ended:
            self.get(name)
