"""How many prompts may be open: the bound on lag without ever discarding a group."""

import math


class Window:
    """Counts open prompts of one run. Pure.

    A prompt is open from its issue until it is dropped (filtered, stale, dead) or until the version that trained it is
    committed on the fleet. At most `capacity` are open, by which the staleness policy keeps its bound.
    """

    def __init__(self, *, capacity: int, groups_per_step: int, steps_left: int, oversampling: float = 1.0) -> None:
        """`oversampling`: prompts that may be open per prompt that training still needs; more than 1 pays only where
        groups are discarded."""
        self.capacity = capacity
        self.wanted = capacity
        """Prompts that should be open, at most `capacity`; at least two batches, or all of a smaller capacity."""
        self._needed = steps_left * groups_per_step
        self._oversampling = oversampling
        self.open = 0

    def allowance(self) -> int:
        """Prompts that may be issued now; never more than training still needs, times the oversampling."""
        return max(0, min(self.capacity, self.wanted, math.ceil(self._needed * self._oversampling)) - self.open)

    def issued(self, count: int) -> None:
        self.open += count

    def dropped(self, count: int) -> None:
        """Groups that are not trained on: their places are free at once (refill)."""
        self.open -= count

    def released(self, count: int) -> None:
        """Trained groups whose version is committed."""
        self.open -= count
        self._needed -= count
