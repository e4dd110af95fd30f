"""Awaiting a peer until somebody hangs up."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class HungUp(Exception):
    """The answer was given up from this side."""


class Line:
    """One conversation: its waits end as soon as another task hangs up.

    Only the waits are guarded, not the time between them: a generator may await through it and be closed by any task.
    """

    def __init__(self) -> None:
        self._hung_up = False
        self._wait: asyncio.Timeout | None = None

    async def until(self, coming: Awaitable[T]) -> T:
        """What `coming` brings, or HungUp."""
        try:
            async with asyncio.timeout(0 if self._hung_up else None) as self._wait:
                result = await coming
        except TimeoutError as error:
            if not self._hung_up:
                raise
            raise HungUp from error
        finally:
            self._wait = None
        if self._hung_up:
            raise HungUp
        return result

    def hang_up(self) -> None:
        """Ends the present wait and all later ones."""
        self._hung_up = True
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())
