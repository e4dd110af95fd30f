"""The contract of a staleness policy. Pure.

A group that was issued at weight version v has lag u - v at most when the learner trains on it at version u; `due` is
the last such u that the bound allows, v + max_lag.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Ticket:
    """A prompt that is open: issued, neither trained on nor dropped."""

    index: int
    version: int
    """Weight version at issue: no token of its answers is older."""
    arrived: bool


class StalenessPolicy(ABC):
    """Chooses batches of `groups_per_step` for one run; keeps nothing between two calls.

    The caller holds at most `max_open` prompts open, those counted that were trained on and whose version is not
    committed yet, and issues none at a version older than the committed one.
    """

    name: ClassVar[str]

    def __init__(self, *, groups_per_step: int, max_lag: int) -> None:
        self._size, self._max_lag = groups_per_step, max_lag

    @property
    def max_open(self) -> int:
        """Prompts that may be open at once."""
        return (self._max_lag + 1) * self._size

    def stale(self, tickets: Iterable[Ticket], version: int) -> list[int]:
        """Indices of arrived groups that are to be discarded when the learner is at `version`: here none."""
        return []

    @abstractmethod
    def choose(self, tickets: Sequence[Ticket], version: int) -> list[int] | None:
        """Indices of the next batch, trained at `version`, in the order of training; None: wait for arrivals."""

    def due(self, ticket: Ticket) -> int:
        """Last version of the learner at which the ticket may be trained on."""
        return ticket.version + self._max_lag
