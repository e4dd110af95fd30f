"""Where the time to the first batch went: the start of an attempt as a sequence of named milestones."""

import time
from collections.abc import Callable


class Milestones:
    """Owns the marks of one attempt. A name that was marked keeps its first time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What `name` stands for is done; it took the time since the milestone before."""
        if name not in self._seconds:
            now = self._clock()
            self._seconds[name], self._last = now - self._last, now

    def figures(self) -> dict[str, float]:
        """`first_batch` in seconds and its parts, which sum up to it; empty until a batch is there."""
        if "rollout" not in self._seconds:
            return {}
        parts = {f"first_batch/{name}": seconds for name, seconds in self._seconds.items()}
        return {"first_batch": sum(self._seconds.values()), **parts}
