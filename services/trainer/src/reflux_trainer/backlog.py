"""Which prompts are open and which groups have arrived, without those that teach nothing."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from reflux_trainer.algo.rewards import has_signal
from reflux_trainer.queue.groups import Arrival, Closing, DeadPrompt
from reflux_trainer.queue.records import Group, Prompt
from reflux_trainer.staleness.base import StalenessPolicy, Ticket


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


def closing_without_groups(arrival: Arrival) -> Closing | None:
    """The same where rewards are compared over the whole step: one known reward teaches."""
    if isinstance(arrival, DeadPrompt):
        return "dead"
    return "unknown" if np.isnan(rewards_of(arrival)).all() else None


class Backlog:
    """Open prompts and the groups that have arrived for them. Pure; which of them make a batch is the policy's."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        next_index: int,
        opened: Mapping[int, int],
        closing: Callable[[Arrival], Closing | None] = closing_of,
    ) -> None:
        """`opened`: weight versions at issue of the prompts that are open already; `next_index` was never issued."""
        self._policy, self._closing = policy, closing
        self._versions = dict(opened)
        self._arrived: dict[int, Group] = {}
        self._next_index = next_index

    def issued(self, prompts: Iterable[Prompt]) -> None:
        """Prompts that are open from now on."""
        for prompt in prompts:
            self._versions[prompt.index] = prompt.version
            self._next_index = max(self._next_index, prompt.index + 1)

    def add(self, arrival: Arrival) -> Closing | None:
        """Takes an arrival and says why it is dropped, if it is: at once, so that its place is refilled at once.

        One that was consumed already is ignored.
        """
        if arrival.index not in self._versions:
            return None
        closing = self._closing(arrival)
        if closing:
            del self._versions[arrival.index]
            return closing
        assert isinstance(arrival, Group)
        self._arrived[arrival.index] = arrival
        return None

    def discard_stale(self, version: int) -> list[Group]:
        """Arrived groups that the policy discards when the learner is at `version`."""
        return [self._leave(index) for index in self._policy.stale(self._tickets(), version)]

    def take(self, version: int) -> list[Group] | None:
        """The next batch, to be trained at `version`; None while it has to be waited for."""
        chosen = self._policy.choose(self._tickets(), version)
        return None if chosen is None else [self._leave(index) for index in chosen]

    @property
    def low_water_index(self) -> int:
        """All prompts below are closed or in a batch."""
        return min(self._versions, default=self._next_index)

    def missing(self) -> str:
        """The prompts that are waited for, for people: the oldest one, and how many."""
        out = [index for index in self._versions if index not in self._arrived]
        return f"prompt {min(out)} ({len(out)} are out)" if out else "prompts to be issued"

    def _tickets(self) -> list[Ticket]:
        return [Ticket(index, version, index in self._arrived) for index, version in self._versions.items()]

    def _leave(self, index: int) -> Group:
        del self._versions[index]
        return self._arrived.pop(index)
