"""A discrete-event ideal of the loop: the product's own staleness policies on a virtual clock, everything else free.

A prompt is issued as soon as the window has room, its group arrives after the longest of its verifications, a batch is
trained in `step_seconds` and its version is committed at once. No queue, no engine, no wire: what the real loop takes
longer is overhead.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reflux_trainer.staleness.base import Ticket
from reflux_trainer.staleness.registry import POLICIES, Staleness
from reflux_trainer.window import Window


@dataclass(frozen=True)
class Ideal:
    """What the simulation found."""

    seconds: float
    """From the first issue to the end of the last step."""
    idle: float
    """Share of that in which nothing was trained."""
    discarded: int


def simulate(
    seconds_of: Callable[[int], float],
    *,
    staleness: Staleness,
    max_lag: int,
    groups: int,
    steps: int,
    step_seconds: float,
) -> Ideal:
    """`steps` steps of `groups` groups; `seconds_of(index)` is how long the group of a prompt takes after its issue."""
    policy = POLICIES[staleness](groups_per_step=groups, max_lag=max_lag)
    window = Window(capacity=policy.max_open, groups_per_step=groups, steps_left=steps)
    versions: dict[int, int] = {}
    arrived: set[int] = set()
    flying: list[tuple[float, int]] = []
    numbers = itertools.count()
    clock, busy, discarded = 0.0, 0.0, 0

    def issue(version: int) -> None:
        for index in itertools.islice(numbers, window.allowance()):
            versions[index] = version
            heapq.heappush(flying, (clock + seconds_of(index), index))
            window.issued(1)

    def tickets() -> Sequence[Ticket]:
        return [Ticket(index, version, index in arrived) for index, version in versions.items()]

    for version in range(steps):
        issue(version)
        while (chosen := policy.choose(tickets(), version)) is None:
            at, index = heapq.heappop(flying)
            clock = max(clock, at)
            arrived.add(index)
            for stale in policy.stale(tickets(), version):
                versions.pop(stale)
                discarded += 1
                window.dropped(1)
                issue(version)
        for index in chosen:
            versions.pop(index)
        clock, busy = clock + step_seconds, busy + step_seconds
        while flying and flying[0][0] <= clock:
            arrived.add(heapq.heappop(flying)[1])
        window.released(groups)
    return Ideal(clock, 1 - busy / clock, discarded)
