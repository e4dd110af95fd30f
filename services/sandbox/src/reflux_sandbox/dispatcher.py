"""Takes jobs from the queues and gives them to sessions: children of this machine, or places elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from reflux_sandbox import metrics
from reflux_sandbox.batch import Batch
from reflux_sandbox.execution import GradeSession
from reflux_sandbox.isolation.base import Isolation, VerifierInfo
from reflux_sandbox.jobs import REMOTE, Fidelity
from reflux_sandbox.leases import Leased, Leases, stop_tasks
from reflux_sandbox.remote.base import Backend, GradingSession
from reflux_sandbox.store import VerificationStore
from reflux_sandbox.waiters import Waiters

_POLL_SECONDS = 1.0
"""How soon jobs show that another process queued or gave back; our own wake the runners at once."""
_MOST_CPU_SECONDS = 7200

Route = Callable[[VerifierInfo], Backend | None]
"""The place elsewhere where a verifier runs; None: here."""


@dataclass(frozen=True, kw_only=True)
class DispatchLimits:
    """How much runs at one time."""

    concurrency: dict[Fidelity, int]
    remote_concurrency: int = 256
    batch_jobs: int
    batch_seconds: float
    memory_bytes: int


class Dispatcher:
    """Use as a context manager. `wake` tells that a job was queued; without it a queue is looked at once a second."""

    def __init__(
        self,
        store: VerificationStore,
        isolation: Isolation,
        limits: DispatchLimits,
        *,
        route: Route = lambda _info: None,
        elsewhere: Sequence[VerifierInfo] = (),
    ) -> None:
        """`elsewhere`: verifiers that only places of `route` have."""
        self._isolation = isolation
        self._limits = limits
        self._route = route
        self._leases = Leases(store)
        self._slots = {**limits.concurrency, REMOTE: limits.remote_concurrency}
        self._waiters = {queue: Waiters() for queue in self._slots}
        self._tasks: set[asyncio.Task[None]] = set()
        self.sessions = 0
        """Children, or sessions elsewhere, used so far."""
        self.verifiers: dict[str, VerifierInfo] = {info.name: info for info in [*isolation.verifiers, *elsewhere]}
        store.on_requeue = self._wake_all

    async def __aenter__(self) -> "Dispatcher":
        await self._leases.__aenter__()
        self._tasks |= {asyncio.create_task(self._pull(queue, slots)) for queue, slots in self._slots.items()}
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_tasks(self._tasks)
        await self._leases.__aexit__()

    def queue_of(self, info: VerifierInfo) -> str:
        """Where jobs of a verifier wait."""
        return info.fidelity if self._route(info) is None else REMOTE

    def wake(self, queue: str, verifier: str) -> None:
        """A job of `verifier` was queued."""
        if queue in self._waiters:
            self._waiters[queue].wake(verifier)

    def abandon(self, job_id: str) -> None:
        """A job was cancelled: stops who works on it now."""
        self._leases.abandon(job_id)

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            waiters.wake("")

    async def _pull(self, queue: str, slots: int) -> None:
        """Claims as many jobs as there are free slots; each starts a session of its own."""
        busy: set[asyncio.Task[None]] = set()
        while True:
            if len(busy) >= slots:
                await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
                continue
            leased, _ = await self._leases.claim(queue, "", slots - len(busy))
            for each in leased:
                task = asyncio.create_task(self._work(queue, each))
                for tasks in (busy, self._tasks):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if not leased:
                await self._waiters[queue].wait("", _POLL_SECONDS)

    async def _work(self, queue: str, leased: Leased) -> None:
        """One session: this job and, for a trusted verifier, others that come within the window."""
        info = self.verifiers.get(leased.job.verifier)
        if info is None:
            text = f"no verifier {leased.job.verifier!r} is installed here any more"
            self._leases.end_unknown(leased, "infra_error", text)
            return
        metrics.SESSIONS.labels(queue).inc()
        self.sessions += 1
        opened, window = asyncio.get_running_loop().time(), self._limits.batch_seconds

        def more(most: int) -> Awaitable[list[Leased]]:  # the window opens with the work, however long a child took
            return self._more(queue, info.name, most, max(opened, leased.started) + window)

        await Batch(self._leases, info, queue, self._limits.batch_jobs).run([leased], self._session(info), more)

    def _session(self, info: VerifierInfo) -> GradingSession:
        if (place := self._route(info)) is not None:
            return place.session(info)
        return GradeSession(
            self._isolation, info.profile, self._limits.memory_bytes, _MOST_CPU_SECONDS, family=info.family
        )

    async def _more(self, queue: str, verifier: str, most: int, closes: float) -> list[Leased]:
        """Further jobs of the verifier; none when the window is over, or when another verifier waits."""
        loop = asyncio.get_running_loop()
        if loop.time() >= closes:
            return []
        while True:
            leased, head = await self._leases.claim(queue, verifier, most)
            left = closes - loop.time()
            if leased or head or left <= 0:
                return leased
            await self._waiters[queue].wait(verifier, left)
