"""Every wait of a run has a name; a run that stands still ends with phase, waiting party and age."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

WORKER_FORGOTTEN_ROUNDS = 300
"""Rounds without a heartbeat after which the name of a worker is dropped."""
WORKERS_GONE_SECONDS = 20
"""Rounds of one second without any heartbeat after which rollout workers count as gone."""


class NoProgress(TimeoutError):
    """Nothing has moved for longer than the run's limit."""


class WorkersGone(RuntimeError):
    """No rollout worker is alive while the loop waits for one."""


@dataclass(eq=False)
class Wait:
    """One wait that goes on."""

    phase: str
    party: str
    since: float
    exempt: bool = False
    """A person asked for it (pause): it never counts as standing still."""


class Waits:
    """Open waits of one run, seconds spent per phase, and the time of the last progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[Wait] = []
        self._moved = clock()
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, phase: str, party: str, *, exempt: bool = False) -> Iterator[None]:
        """Names a wait: `phase` is what the run does, `party` whom it waits for. Its end is progress."""
        wait = Wait(phase, party, self._clock(), exempt)
        self._open.append(wait)
        try:
            yield
        finally:
            self._open.remove(wait)
            self._spent[phase] += self._clock() - wait.since
            self.progress()

    def progress(self) -> None:
        """Something moved."""
        self._moved = self._clock()

    def drain_spent(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent

    def waits_for(self, phase: str) -> bool:
        """True while a wait of this phase is open."""
        return any(wait.phase == phase for wait in self._open)

    def check(self, limit_seconds: float) -> None:
        """Raises NoProgress when nothing has moved for `limit_seconds`."""
        still = self._clock() - self._moved
        if still <= limit_seconds or any(wait.exempt for wait in self._open):
            return
        raise NoProgress(f"no progress for {still:.0f} s (limit {limit_seconds:.0f} s); {self.describe()}")

    def describe(self) -> str:
        """Phase, waiting party and age of each open wait."""
        now = self._clock()
        named = [f"{wait.phase}: waiting for {wait.party} since {now - wait.since:.0f} s" for wait in self._open]
        return "; ".join(named) or "nothing is waited for"


class WorkerWatch:
    """Tells workers that are gone from a Redis that is away: only answered rounds count."""

    def __init__(
        self,
        beats: Callable[[], Awaitable[dict[str, int]]],
        forget: Callable[[Sequence[str]], Awaitable[None]],
        waits: Waits,
        rounds: int,
    ) -> None:
        self._beats = beats
        self._forget = forget
        self._still: dict[str, int] = {}
        self._waits = waits
        self._limit = rounds
        self._last: dict[str, int] = {}
        self._silent = 0

    async def check(self) -> None:
        """One round. Raises WorkersGone after `rounds` silent ones while the loop waits for rollouts."""
        beats = await self._beats()
        self._silent = self._silent + 1 if beats == self._last and self._waits.waits_for("wait_rollout") else 0
        await self._forget_dead(beats)
        self._last = beats
        if self._silent >= self._limit:
            raise WorkersGone(
                f"all rollout workers are gone: none of {len(beats)} has been heard of for {self._silent} s; "
                f"{self._waits.describe()}"
            )

    async def _forget_dead(self, beats: dict[str, int]) -> None:
        """Each restart of a worker brings a new name; those of the dead would stay for ever."""
        self._still = {
            name: self._still.get(name, 0) + 1 for name, count in beats.items() if self._last.get(name) == count
        }
        dead = [name for name, rounds in self._still.items() if rounds >= WORKER_FORGOTTEN_ROUNDS]
        if dead:
            await self._forget(dead)


async def watch(waits: Waits, limit_seconds: float, workers: WorkerWatch | None, interval_seconds: float = 1.0) -> None:
    """Checks once per interval until it raises or is cancelled."""
    while True:
        await asyncio.sleep(interval_seconds)
        if workers is not None:
            await workers.check()
        waits.check(limit_seconds)
