"""Which groups a batch is made of: by rising prompt index, without those that teach nothing."""

from collections.abc import Iterable

import numpy as np

from reflux_trainer.algo.rewards import has_signal
from reflux_trainer.queue.groups import Arrival, Closing, DeadPrompt
from reflux_trainer.queue.records import Group


def rewards_of(group: Group) -> np.ndarray:
    """Raw rewards [samples]; NaN where the reward is unknown."""
    return np.array([grade.reward if grade.known else np.nan for grade in group.grades])


def closing_of(arrival: Arrival) -> Closing | None:
    """Why a group is not trained on; None when it is. Decided on the raw rewards that are known."""
    if isinstance(arrival, DeadPrompt):
        return "dead"
    rewards = rewards_of(arrival)
    if np.count_nonzero(~np.isnan(rewards)) < 2:
        return "unknown"
    return None if has_signal(rewards) else "filtered"


class Backlog:
    """Arrived groups that are not consumed yet. Pure.

    Batches are composed in the order of prompt indices and wait for the next one, whatever else has arrived: the
    composition depends on the rewards only, never on timing.
    """

    def __init__(self, *, next_index: int, groups_per_step: int, closed: Iterable[int] = ()) -> None:
        self.next_index = next_index
        self._size = groups_per_step
        self._closed = {index for index in closed if index >= next_index}
        self._arrived: dict[int, Group] = {}
        self._batch: list[Group] = []

    def add(self, arrival: Arrival) -> Closing | None:
        """Takes an arrival and says why it is dropped, if it is: at once, so that its place is refilled at once.

        One that was consumed already is ignored.
        """
        if arrival.index < self.next_index or arrival.index in self._closed:
            return None
        closing = closing_of(arrival)
        if closing:
            self._closed.add(arrival.index)
            return closing
        assert isinstance(arrival, Group)
        self._arrived[arrival.index] = arrival
        return None

    def advance(self) -> bool:
        """Moves on as far as groups have arrived; True when the batch is full."""
        while not self.full:
            if self.next_index in self._arrived:
                self._batch.append(self._arrived.pop(self.next_index))
            elif self.next_index in self._closed:
                self._closed.remove(self.next_index)
            else:
                return False
            self.next_index += 1
        return True

    @property
    def full(self) -> bool:
        return len(self._batch) == self._size

    @property
    def waiting(self) -> int:
        """Groups that have arrived and wait for their turn."""
        return len(self._arrived)

    def take(self) -> list[Group]:
        """The full batch; the next one starts empty."""
        assert self.full
        batch, self._batch = self._batch, []
        return batch
