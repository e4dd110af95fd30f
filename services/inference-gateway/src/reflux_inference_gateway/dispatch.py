"""The life of one request at the gateway: enter, hold, choose a replica, send, re-issue once, leave."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from reflux_inference_gateway import metrics
from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded, UnknownModel
from reflux_inference_gateway.fleet import Fleet, FleetPaused
from reflux_inference_gateway.replicas import Replica, ReplicaTable
from reflux_inference_gateway.retry import Attempts
from reflux_inference_gateway.routing.base import Ask, RoutingPolicy

T = TypeVar("T")


class ReplicaLost(Exception):
    """The connection to a replica broke before its answer was complete. Adapters raise it; only it is retried."""


class GivenUp(Exception):
    """The request was aborted while it waited for a replica."""


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Want:
    """What a request asks of the fleet."""

    model_id: str
    num_tokens: int
    """Upper bound of prompt and generated tokens; the load counted on the replica until the answer is complete."""
    min_version: int = 0
    max_lag: int | None = None
    """Versions that the replica may be behind the newest one of the model in the fleet; None allows any."""
    version: int | None = None
    """The one weight version that will do, the trajectory's; None takes any."""
    ask: Ask | None = None
    """What the routing policy may know of the request; None lets it know nothing."""
    session: str = ""
    """Trajectory or session that it belongs to; empty when it stands alone."""
    tenant: str = ""
    """Who pays for it, where queues are shared fairly; empty when nobody in particular does."""
    priority: int = 0
    """Higher ones go first where requests queue."""
    http: bool = False
    """Needs a replica with an OpenAI-compatible door."""
    deadline_seconds: float
    """Seconds from now after which the caller no longer waits."""
    given_up: Callable[[], bool] = _never
    """True once somebody aborted the request; looked at while it waits."""


class Changes:
    """Wakes everyone who waits whenever the fleet changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def upcoming(self) -> asyncio.Event:
        """The event of the next change; take it before reading the state that it guards."""
        return self._event

    def notify(self) -> None:
        """Wakes all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seconds: float | None) -> bool:
        """Waits for the next change; False when the time ran out first."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


@dataclass
class Dispatcher:
    """Owns the fleet's state in this process; both front doors go through `stream`."""

    table: ReplicaTable
    fleet: Fleet
    new_policy: Callable[[], RoutingPolicy]
    replica_wait_seconds: float
    """How long a request waits for a fitting replica while the fleet is not paused."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.changes = Changes()
        self._policies: dict[str, RoutingPolicy] = {}
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._started = self.clock()

    async def stream(self, want: Want, send: Callable[[Replica], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Yields what `send(replica)` yields; a replica that is lost before the first item is replaced once.

        Raises Overloaded when too many requests are held, UnknownModel or NoReplica when no replica fits in time,
        GivenUp when the request was aborted meanwhile, and GenerationLost when the answer broke. Close the iterator
        (`aclosing`) to cancel the request upstream.
        """
        try:
            self.fleet.enter(want.model_id)
        except FleetPaused as error:
            raise Overloaded(str(error)) from error
        attempts, running, outcome = Attempts.none(), False, "failed"
        deadline = self.clock() + want.deadline_seconds
        try:
            while outcome != "completed":
                replica = await self._choose(want, attempts, deadline)
                self.fleet.run(want.model_id)
                running = True
                try:
                    async with aclosing(self._attempt(replica, want, attempts, send)) as items:
                        async for item in items:
                            yield item
                    outcome = "completed"
                except ReplicaLost as error:
                    self._lose(replica, error, attempts)
                    metrics.REISSUED.inc()
                    self.fleet.hold_again(want.model_id)
                    running = False
        except (asyncio.CancelledError, GeneratorExit, GivenUp):
            outcome = "cancelled"
            raise
        finally:
            self.fleet.end(want.model_id, was_running=running, outcome=outcome)
            metrics.REQUESTS.labels(outcome).inc()

    async def _attempt(
        self, replica: Replica, want: Want, attempts: Attempts, send: Callable[[Replica], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        name = replica.info.name
        attempts.tried.append(name)
        self.table.dispatched(name, want.num_tokens)
        try:
            async with aclosing(send(replica)) as items:
                while True:
                    try:
                        item = await self._next(name, items)
                    except StopAsyncIteration:
                        return
                    attempts.delivered = True
                    yield item
        finally:
            self.table.answered(name, want.num_tokens)

    async def _next(self, name: str, items: AsyncGenerator[T, None]) -> T:
        """The next item, or ReplicaLost as soon as the replica is abandoned."""
        waits = self._waits.setdefault(name, set())
        try:
            async with asyncio.timeout(None) as wait:
                waits.add(wait)
                try:
                    return await anext(items)
                finally:
                    waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise ReplicaLost("it sends no heartbeat any more") from error

    def abandon(self, name: str) -> None:
        """Ends every wait for a silent replica; its requests are re-issued or fail like those of a dead one."""
        for wait in self._waits.pop(name, ()):
            wait.reschedule(asyncio.get_running_loop().time())

    def _lose(self, replica: Replica, error: ReplicaLost, attempts: Attempts) -> None:
        self.table.mark_lost(replica.info.name)
        self.changes.notify()
        if not attempts.may_reissue():
            raise GenerationLost(
                f"{replica.info.name} broke off ({error}); {_why_not_again(attempts)}", replica=replica.info.name
            ) from error

    async def _choose(self, want: Want, attempts: Attempts, deadline: float) -> Replica:
        """Waits until a replica fits; time while the fleet is paused does not count as waiting for one."""
        waited_seconds = 0.0
        while True:
            started = self.clock()
            if want.given_up():
                raise GivenUp
            paused = self.fleet.is_paused(want.model_id)
            if not paused and (replica := self._pick(want, attempts)):
                return replica
            left = deadline - started
            patience = left if paused else min(left, self.replica_wait_seconds - waited_seconds)
            if patience <= 0 or not await self.changes.wait(patience):
                raise self._nobody(want, paused, deadline - want.deadline_seconds)
            waited_seconds += 0.0 if paused else self.clock() - started

    def _pick(self, want: Want, attempts: Attempts) -> Replica | None:
        """An untried replica first; a tried one that came back rather than none."""
        for excluded in (attempts.tried, []) if attempts.tried else ([],):
            fitting = self.table.routable(
                want.model_id,
                min_version=self._min_version(want),
                version=want.version,
                excluded=excluded,
                http=want.http,
            )
            if fitting:
                policy = self._policies.setdefault(want.model_id, self.new_policy())
                return self.table.get(policy.choose([entry.candidate() for entry in fitting], want.ask or Ask()))
        return None

    def _min_version(self, want: Want) -> int:
        if want.max_lag is None:
            return want.min_version
        return max(want.min_version, self.table.newest_version(want.model_id) - want.max_lag)

    def _nobody(self, want: Want, paused: bool, entered: float) -> NoReplica | UnknownModel:
        entries = self.table.entries(want.model_id)
        if paused:
            return NoReplica(f"the fleet of {want.model_id!r} stayed paused until the deadline", state="paused")
        if not entries:
            return self._absent(want.model_id, entered)
        newest = max(entry.info.version for entry in entries)
        faults = "".join(f"; unhealthy {fault}" for fault in self.table.faults(want.model_id))
        return NoReplica(
            f"no replica of {want.model_id!r} took the request in time: {len(entries)} known, newest version {newest}, "
            f"asked for at least {want.min_version}{faults}",
            state="waiting",
        )

    def _absent(self, model_id: str, entered: float) -> NoReplica | UnknownModel:
        """Replicas that died, or that a restarted gateway has not heard yet, are no mistake of the caller."""
        if self.table.ever_served(model_id) or entered < self._started + self.replica_wait_seconds:
            return NoReplica(f"no replica of {model_id!r} is there now", state="absent")
        return UnknownModel(f"no replica serves the model {model_id!r}", model=model_id)


def _why_not_again(attempts: Attempts) -> str:
    return "a part of the answer was out" if attempts.delivered else "this was the second replica"
