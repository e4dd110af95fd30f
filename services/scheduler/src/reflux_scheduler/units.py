"""Owns pieces of work that go on to their end when whoever asked for them leaves: to store something and to know it.

A caller leaves when its deadline is over, or its connection. Were the work torn there, the store would hold what this
scheduler does not know.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from reflux_scheduler.errors import NotLeading

log = logging.getLogger(__name__)

_Outcome = TypeVar("_Outcome")


class Units:
    """`close` ends what is under way; the store is read anew after it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _Outcome]) -> _Outcome:
        """The outcome of `work`. Raises what it raises, and NotLeading when `close` has ended it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.add_done_callback(_note_failure)
            raise
        if task.cancelled():
            raise NotLeading("")
        return task.result()

    async def close(self) -> None:
        """Ends all of it; whether Redis still carries out what it was sent is not known."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note_failure(task: "asyncio.Task[Any]") -> None:
    """Nobody waits for it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a change whose caller has left failed: %s: %s", type(error).__name__, error)
