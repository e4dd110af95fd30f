"""How many prompts may be open: the bound on lag without ever discarding a group."""


class Window:
    """Counts open prompts of one run. Pure.

    A prompt is open from its issue until it is dropped (filtered, dead) or until the version that trained it is
    committed on the fleet. At most (max_lag + 1) * groups_per_step are open and they are trained in the order of their
    indices, so a prompt issued at version v is trained at the latest when the learner is at v + max_lag: at issue,
    fewer than (max_lag + 1) * groups_per_step prompts lie before it, that is max_lag whole batches at most.
    """

    def __init__(self, *, max_lag: int, groups_per_step: int, steps_left: int) -> None:
        self._capacity = (max_lag + 1) * groups_per_step
        self._needed = steps_left * groups_per_step
        self.open = 0

    def allowance(self) -> int:
        """Prompts that may be issued now; never more than training still needs."""
        return max(0, min(self._capacity, self._needed) - self.open)

    def issued(self, count: int) -> None:
        self.open += count

    def dropped(self, count: int) -> None:
        """Filtered or dead groups: their places are free at once (refill)."""
        self.open -= count

    def released(self, count: int) -> None:
        """Trained groups whose version is committed."""
        self.open -= count
        self._needed -= count
