"""Who is woken by a new job: first the open child of the same verifier, then an idle runner, then any open child."""

import asyncio
from collections import deque


class Waiters:
    """Waiting runners of one fidelity. A wake-up while nobody waits is kept for the next one who does: none is lost."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._missed = False

    async def wait(self, verifier: str, seconds: float) -> None:
        """Returns at a wake-up or after `seconds`; `verifier` is "" for an idle runner."""
        if self._missed:
            self._missed = False
            return
        entry = (verifier, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await asyncio.wait([entry[1]], timeout=seconds)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def wake(self, verifier: str) -> None:
        """Wakes the one who can start a job of `verifier` soonest."""
        for wanted in (verifier, ""):
            for entry in self._waiting:
                if entry[0] == wanted:
                    self._release(entry)
                    return
        if self._waiting:
            self._release(self._waiting[0])
        else:
            self._missed = True

    def _release(self, entry: tuple[str, asyncio.Future[None]]) -> None:
        self._waiting.remove(entry)
        entry[1].set_result(None)
