"""Waits for the groups of the next batch; groups that teach nothing are closed and refilled on the way."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux_trainer.backlog import Backlog, rewards_of
from reflux_trainer.issue import Issuer
from reflux_trainer.queue.groups import Arrival, Closing, GroupQueue
from reflux_trainer.queue.records import Group
from reflux_trainer.watchdog import Waits
from reflux_trainer.window import Window

_BLOCK_MS = 1000
MAX_DROPPED_BATCHES = 40
"""Batches' worth of groups that may be dropped while one batch is formed; more, and at least MIN_DROPPED_LIMIT, means
that the run cannot learn."""
MIN_DROPPED_LIMIT = 1000
SOLVED_REWARD = 0.9
"""Mean reward of dropped groups above which their equal rewards mean success."""


class NothingToLearn(RuntimeError):
    """Group after group was dropped; the message says for which reasons."""


def explain(dropped: Sequence[tuple[Arrival, Closing]]) -> str:
    """Why nothing is left to learn, and what helps: a solved task and a hopeless one look alike but for the reward."""
    reasons = ", ".join(f"{count} {why}" for why, count in Counter(why for _, why in dropped).items())
    rewards = [rewards_of(arrival) for arrival, _ in dropped if isinstance(arrival, Group)]
    known = np.concatenate(rewards) if rewards else np.array([])
    known = known[~np.isnan(known)]
    head = f"{len(dropped)} groups were dropped for one batch ({reasons})"
    if not known.size:
        return f"{head}: no reward is known; check the verifier and the sandbox"
    mean = float(known.mean())
    if mean > SOLVED_REWARD:
        return f"{head}: their mean reward is {mean:.2f}, the task is solved; make it harder, or take fewer rl.steps"
    return (
        f"{head}: rewards of a group hardly ever differ, their mean is {mean:.2f}; warm up longer, sample at a higher "
        "rl.temperature or with more rl.samples_per_group, or check the verifier"
    )


def verify_share(began: float, ended: float, last: Group) -> float:
    """Seconds of the wait [began, ended] for `last` in which its verification went on; the rest is its rollout."""
    generated = last.claimed_at + last.generate_seconds
    return max(0.0, min(ended, last.emitted_at) - max(began, generated))


@dataclass(frozen=True)
class Batch:
    """One step's groups in the order of training, and what was dropped while it was formed."""

    groups: Sequence[Group]
    dropped: Sequence[tuple[Arrival, Closing]]
    low_water_index: int
    """All prompts below are closed or in the batch."""
    formed_at: float = 0.0
    """Unix time."""
    verify_wait_seconds: float = 0.0
    """Part of the wait for its groups in which the one that came last was being verified."""

    @property
    def finished(self) -> list[Group]:
        """All groups with samples, dropped ones included."""
        return [*self.groups, *(arrival for arrival, _ in self.dropped if isinstance(arrival, Group))]


class BatchFormer:
    """Turns arrivals into batches."""

    def __init__(
        self, queue: GroupQueue, backlog: Backlog, window: Window, issuer: Issuer, waits: Waits, groups_per_step: int
    ) -> None:
        self._queue = queue
        self._backlog = backlog
        self._window = window
        self._issuer = issuer
        self._waits = waits
        self._verify_wait = 0.0
        self._limit = max(MIN_DROPPED_LIMIT, MAX_DROPPED_BATCHES * groups_per_step)

    async def form(self, version: int) -> Batch:
        """The next full batch, to be trained when the learner is at `version`. Raises NothingToLearn."""
        dropped: list[tuple[Arrival, Closing]] = []
        self._verify_wait = 0.0
        while (groups := self._backlog.take(version)) is None:
            dropped += await self._receive(version)
            if sum(why != "stale" for _, why in dropped) > self._limit:
                raise NothingToLearn(explain(dropped))
        return Batch(groups, dropped, self._backlog.low_water_index, time.time(), self._verify_wait)

    async def _receive(self, version: int) -> list[tuple[Arrival, Closing]]:
        """Waits for arrivals; closes and refills those that are dropped, and returns them."""
        arrivals: list[Arrival] = []
        began = time.time()
        with self._waits.on("wait_rollout", f"the rollout workers to finish {self._backlog.missing()}"):
            while not arrivals:
                arrivals = await self._queue.read(_BLOCK_MS)
        if isinstance(last := arrivals[-1], Group):
            self._verify_wait += verify_share(began, time.time(), last)
        dropped: list[tuple[Arrival, Closing]] = []
        for arrival in arrivals:
            closing = self._backlog.add(arrival)
            if closing is not None:
                dropped.append((arrival, closing))
        for group in self._backlog.discard_stale(version):
            dropped.append((group, "stale"))
        if dropped:
            await self._queue.close(dropped)
            self._window.dropped(len(dropped))
            await self._issuer.fill()
        return dropped
