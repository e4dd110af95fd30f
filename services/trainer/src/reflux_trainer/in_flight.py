"""How many prompts to keep open, from what was measured: enough that the trainer does not wait, and no more. Pure.

Little's law (Operations Research 9, 383, 1961): whoever takes `rate` groups a second out of a pipe that holds each of
them for `latency` seconds needs rate * latency in it. The rate is what the trainer would take if it never waited, the
latency a high quantile of what groups took from issue to verdict. Two batches come on top: the one in training, whose
prompts stay open until its version is committed, and the one that is being put together. Where rollouts are the
bottleneck the law asks for more than the bound on lag allows, and the bound holds.
"""

import math
from collections import deque
from collections.abc import Sequence

_QUANTILE = 0.9
_GROUPS_REMEMBERED, _STEPS_REMEMBERED = 512, 16
_LEAST_STEPS = 2


class InFlight:
    """One run's estimate."""

    def __init__(self, *, groups_per_step: int, most: int) -> None:
        """`most`: what the bound on lag allows."""
        self._size, self._most = groups_per_step, most
        self._latencies: deque[float] = deque(maxlen=_GROUPS_REMEMBERED)
        self._busy: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def observe(self, latencies: Sequence[float], busy_seconds: float) -> None:
        """What the groups of a step took from issue to verdict, and the step without its wait for them; seconds."""
        self._latencies.extend(latencies)
        self._busy.append(max(busy_seconds, 1e-6))

    @property
    def wanted(self) -> int:
        """Prompts to keep open; all that are allowed until two steps were seen."""
        if len(self._busy) < _LEAST_STEPS or not self._latencies:
            return self._most
        ordered, busy = sorted(self._latencies), sorted(self._busy)
        latency = ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]
        rate = self._size / busy[len(busy) // 2]
        return min(self._most, math.ceil(rate * latency) + 2 * self._size)
