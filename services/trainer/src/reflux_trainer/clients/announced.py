"""Results that a stream announces by name: it tells at once, polls cover what it told too early, or not at all."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_MAX_EARLY = 1024


class Announced(Generic[T]):
    """Named results of one stream."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[T]] = {}
        self._early: OrderedDict[str, T] = OrderedDict()
        """Results that came before anybody knew their name."""

    def deliver(self, name: str, result: T) -> None:
        """The stream has told a result."""
        future = self._waiting.get(name)
        if future is None:
            self._early[name] = result
            if len(self._early) > _MAX_EARLY:
                self._early.popitem(last=False)
        elif not future.done():
            future.set_result(result)

    async def wait(self, name: str, poll_seconds: float, poll: Callable[[], Awaitable[T | None]]) -> T:
        """The result of a name. Asks `poll` every `poll_seconds`; what that raises leaves."""
        if name in self._early:
            return self._early.pop(name)
        future = self._waiting.setdefault(name, asyncio.get_running_loop().create_future())
        try:
            while True:
                done, _ = await asyncio.wait([future], timeout=poll_seconds)
                if done:
                    return future.result()
                if (result := await poll()) is not None:
                    return result
        finally:
            self._waiting.pop(name, None)
