"""The life of one request at the gateway: enter, hold, choose replicas, send, re-issue a lost share once, leave."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from reflux_inference_gateway import metrics
from reflux_inference_gateway.changes import Changes
from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded, UnknownModel
from reflux_inference_gateway.fleet import Fleet, FleetPaused, Stay
from reflux_inference_gateway.matching import fitting, is_syncing, nobody
from reflux_inference_gateway.merging import merged
from reflux_inference_gateway.replicas import Replica, ReplicaTable
from reflux_inference_gateway.retry import Attempts
from reflux_inference_gateway.routing.base import Ask, RoutingPolicy
from reflux_inference_gateway.verdicts import Verdicts
from reflux_inference_gateway.want import Want

T = TypeVar("T")


class ReplicaLost(Exception):
    """The connection to a replica broke before its answer was complete. Adapters raise it; only it is retried."""


class GivenUp(Exception):
    """The request was aborted while it waited for a replica."""


class Parked(Exception):
    """A share was stopped for a pause and goes on after it. Senders raise it; they know what is missing."""


@dataclass(eq=False)
class Share:
    """One part of a request on its way: samples `first .. first + count - 1`."""

    want: Want
    """The request as far as it is this part."""
    first: int
    count: int
    stay: Stay
    deadline: float
    attempts: Attempts = field(default_factory=Attempts.none)
    replica: Replica | None = None
    """Where its load is counted now."""
    load: int = 0
    """Tokens that are counted there."""
    verdict: bool | None = None
    """Whether that replica answered or failed; None while it is open, or when the end says nothing about it."""
    given_up: bool = False


@dataclass
class Dispatcher:
    """Owns the fleet's state in this process; both front doors go through `stream` or `stream_group`."""

    table: ReplicaTable
    fleet: Fleet
    new_policy: Callable[[], RoutingPolicy]
    replica_wait_seconds: float
    """How long a request waits for a fitting replica while the fleet is neither paused nor changing its version."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.changes = Changes()
        self.verdicts = Verdicts()
        self._policies: dict[str, RoutingPolicy] = {}
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._started = self.clock()

    async def stream(self, want: Want, send: Callable[[Replica], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Yields what `send(replica)` yields; a replica that is lost before the first item is replaced once.

        Raises Overloaded when too many requests are held, UnknownModel, NoReplica or VersionGone when no replica fits
        in time, GivenUp when the request was aborted meanwhile, and GenerationLost when the answer broke. Close the
        iterator (`aclosing`) to cancel the request upstream.
        """
        with self._staying(want) as stay:
            share = Share(want, 0, want.num_samples, stay, self.clock() + want.deadline_seconds)
            async with aclosing(self._served(share, lambda replica, _: send(replica))) as items:
                async for item in items:
                    yield item
            if share.given_up:
                raise GivenUp

    async def stream_group(
        self, want: Want, send: Callable[[Replica, Share], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Like `stream`, but several replicas may each take a part of the samples, as the routing policy splits them.

        A part whose replica is lost before anything of that part came is re-issued alone; the others go on.
        """
        with self._staying(want) as stay:
            shares = await self._split(want, stay)
            try:
                served = [self._served(share, send) for share in shares]
                async with aclosing(merged(served) if len(served) > 1 else served[0]) as items:
                    async for item in items:
                        yield item
            finally:
                for share in shares:  # those that were not begun, too
                    self._leave(share)
            if any(share.given_up for share in shares):
                raise GivenUp

    def finished(self, share: Share, num_samples: int, generated_tokens: Sequence[int]) -> None:
        """Samples of a share are done: their load ends, and the routing policy learns how long they became (without
        those that were aborted).
        """
        ask = share.want.ask
        if share.replica is None or ask is None:
            return
        done = min(share.load, num_samples * ask.max_tokens)
        share.load -= done
        self.table.lighten(share.replica.info.name, done)
        self._policy(share.want.model_id).finished(share.replica.info.name, ask, generated_tokens)

    def forget(self, name: str) -> None:
        """A replica left or is a new process: nothing that is known of its cache and its failures holds."""
        self.verdicts.forget(name)
        for policy in self._policies.values():
            policy.forget(name)

    def abandon(self, name: str) -> None:
        """Ends every wait for a silent replica; its requests are re-issued or fail like those of a dead one."""
        for wait in self._waits.pop(name, ()):
            wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def _staying(self, want: Want) -> Iterator[Stay]:
        """The request's entry in the ledger, from when it enters to when it leaves, however that is."""
        try:
            self.fleet.enter(want.model_id)
        except FleetPaused as error:
            raise Overloaded(str(error)) from error
        stay, outcome = Stay(self.fleet, want.model_id), "failed"
        try:
            yield stay
            outcome = "completed"
        except (asyncio.CancelledError, GeneratorExit, GivenUp):
            outcome = "cancelled"
            raise
        finally:
            stay.end(outcome)
            metrics.REQUESTS.labels(outcome).inc()

    async def _served(
        self, share: Share, send: Callable[[Replica, Share], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """What the replica of a share yields, or the next one's when it is lost with nothing out."""
        while True:
            try:
                replica = share.replica or await self._place(share)
                share.stay.start()
                async with aclosing(send(replica, share)) as items:
                    while True:
                        try:
                            item = await self._next(replica.info.name, items)
                        except StopAsyncIteration:
                            share.verdict = True
                            return
                        share.attempts.delivered = True
                        yield item
            except ReplicaLost as error:
                self._lose(share, error)
            except Parked:
                share.attempts = Attempts.none()
                share.stay.stop()
                self.changes.notify()
            except GivenUp:
                share.given_up = True
                return
            finally:
                self._leave(share)

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

    def _lose(self, share: Share, error: ReplicaLost) -> None:
        name, share.verdict = share.attempts.tried[-1], False
        self.table.mark_lost(name)
        self.changes.notify()
        if not share.attempts.may_reissue():
            raise GenerationLost(
                f"{name} broke off ({error}); {_why_not_again(share.attempts)}", replica=name
            ) from error
        metrics.REISSUED.inc()
        share.stay.stop()

    async def _place(self, share: Share) -> Replica:
        """Waits for a replica that takes the share, and counts its load there from this moment."""
        found = await self._fitting(share.want, share.attempts, share.deadline)
        candidates = [entry.candidate() for entry in found]
        return self._seat(share, self._policy(share.want.model_id).choose(candidates, share.want.ask or Ask()))

    async def _split(self, want: Want, stay: Stay) -> list[Share]:
        """Waits for replicas that fit, and counts the load of every share from this moment."""
        deadline = self.clock() + want.deadline_seconds
        found = await self._fitting(want, Attempts.none(), deadline)
        parts = self._policy(want.model_id).split([entry.candidate() for entry in found], want.ask or Ask())
        shares, first = [], 0
        for one in parts:
            share = Share(want.narrowed(one.num_samples), first, one.num_samples, stay, deadline)
            self._seat(share, one.name)
            shares.append(share)
            first += one.num_samples
        assert first == want.num_samples, f"the policy split {want.num_samples} samples into {parts}"
        return shares

    def _seat(self, share: Share, name: str) -> Replica:
        replica = self.table.get(name)
        assert replica is not None, f"the policy chose {name}, which is no candidate"
        self.table.dispatched(name, share.want.num_tokens)
        self.verdicts.started(name, self.clock())
        share.attempts.tried.append(name)
        share.replica, share.load = replica, share.want.num_tokens
        return replica

    def _leave(self, share: Share) -> None:
        if share.replica is not None:
            self.table.answered(share.replica.info.name, share.load)
            self.verdicts.ended(share.replica, share.verdict, self.clock())
            share.replica, share.load, share.verdict = None, 0, None

    def _policy(self, model_id: str) -> RoutingPolicy:
        if model_id not in self._policies:
            self._policies[model_id] = self.new_policy()
        return self._policies[model_id]

    async def _fitting(self, want: Want, attempts: Attempts, deadline: float) -> list[Replica]:
        """Waits until replicas fit. Time while the fleet is paused, or while the version that was asked for is on its
        way, does not count as waiting for one: it is bounded by the deadline only.
        """
        waited_seconds = 0.0
        while True:
            started = self.clock()
            if want.given_up():
                raise GivenUp
            paused = self.fleet.holds(want.model_id, begins=want.begins)
            if not paused and (found := fitting(self.table, want, attempts.tried)):
                return self.verdicts.preferred(want, found, started)
            bounded = not paused and not is_syncing(self.table, want)
            left = deadline - started
            patience = min(left, self.replica_wait_seconds - waited_seconds) if bounded else left
            if patience <= 0 or not await self.changes.wait(patience):
                raise self._nobody(want, deadline - want.deadline_seconds)
            waited_seconds += self.clock() - started if bounded else 0.0

    def _nobody(self, want: Want, entered: float) -> NoReplica | UnknownModel:
        if self.fleet.holds(want.model_id, begins=want.begins):
            return NoReplica(f"the fleet of {want.model_id!r} stayed paused until the deadline", state="paused")
        if not self.table.entries(want.model_id):
            return self._absent(want.model_id, entered)
        return nobody(self.table, want)

    def _absent(self, model_id: str, entered: float) -> NoReplica | UnknownModel:
        """Replicas that died, or that a restarted gateway has not heard yet, are no mistake of the caller."""
        if self.table.ever_served(model_id) or entered < self._started + self.replica_wait_seconds:
            return NoReplica(f"no replica of {model_id!r} is there now", state="absent")
        return UnknownModel(f"no replica serves the model {model_id!r}", model=model_id)


def _why_not_again(attempts: Attempts) -> str:
    return "a part of the answer was out" if attempts.delivered else "this was the second replica"
