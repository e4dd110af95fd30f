"""The life of one request at the gateway: enter, hold, choose replicas, send, re-issue a lost share once, leave."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
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
from reflux_inference_gateway.routing.base import Ask, Candidate, RoutingPolicy
from reflux_inference_gateway.share import GivenUp, Parked, ReplicaLost, Share
from reflux_inference_gateway.verdicts import Verdicts
from reflux_inference_gateway.waiting_room import NoTurn, WaitingRoom
from reflux_inference_gateway.want import Want

T = TypeVar("T")
Attempt = Callable[[Replica, Share], Awaitable[bool]]
"""Asks a replica and passes its answer on; False when the answer says that the replica failed. Raises ReplicaLost. It
sets `attempts.delivered` before the client sees a byte."""


@dataclass
class Dispatcher:
    """Owns the fleet's state in this process; both front doors go through `serve` or `stream_group`."""

    table: ReplicaTable
    fleet: Fleet
    new_policy: Callable[[], RoutingPolicy]
    replica_wait_seconds: float
    """How long a request waits for a fitting replica while the fleet is neither paused nor changing its version."""
    full_at_capacities: float = 0.0
    """A replica with so many times its capacity in flight gets nothing more: requests queue here. 0 is no limit."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.changes = Changes()
        self.verdicts = Verdicts()
        self.waiting_room = WaitingRoom(self._has_room, self.fleet.max_held, self.tenant_weights)
        self.changes.listeners.append(self.waiting_room.changed)
        self._policies: dict[str, RoutingPolicy] = {}
        self._waits: dict[str, set[asyncio.Timeout]] = {}
        self._started = self.clock()

    async def serve(self, want: Want, attempt: Attempt) -> None:
        """Has one replica answer the request; one that is lost with nothing delivered is replaced once.

        Raises Overloaded when too many requests are held, UnknownModel, NoReplica or VersionGone when no replica fits
        in time, GivenUp when the request was aborted meanwhile, and GenerationLost when the answer broke. Cancel it to
        cancel the request upstream.
        """
        with self._staying(want) as stay:
            share = Share(want, 0, want.num_samples, stay, self.clock() + want.deadline_seconds)
            while True:
                try:
                    replica = await self._place(share)
                    share.verdict = await self._watched(replica.info.name, attempt(replica, share))
                    return
                except ReplicaLost as error:
                    self._lose(share, error)
                finally:
                    self._leave(share)

    async def stream_group(
        self, want: Want, send: Callable[[Replica, Share], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Like `serve`, for answers that come in pieces: yields what `send` yields. Several replicas may each take a
        part of the samples, as the routing policy splits them.

        A part whose replica is lost before anything of that part came is re-issued alone; the others go on. Close the
        iterator (`aclosing`) to cancel upstream.
        """
        with self._staying(want) as stay:
            shares: list[Share] = []
            try:
                await self._split(want, stay, shares)
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
        share.num_open -= num_samples
        self.table.lighten(share.replica.info.name, done, num_samples)
        self.waiting_room.serve(*self.table.models_beside(share.replica.info))
        self._policy(share.want.model_id).finished(share.replica.info.name, ask, generated_tokens)

    def forget(self, name: str) -> None:
        """A replica left or is a new process: nothing that is known of its cache and its failures holds."""
        self.verdicts.forget(name)
        if not self._waits.get(name):
            self._waits.pop(name, None)
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
                async with aclosing(send(replica, share)) as items:
                    while True:
                        try:
                            item = await self._watched(replica.info.name, anext(items))
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

    async def _watched(self, name: str, answer: Awaitable[T]) -> T:
        """What is awaited of a replica, or ReplicaLost as soon as it is abandoned."""
        waits = self._waits.setdefault(name, set())
        try:
            async with asyncio.timeout(None) as wait:
                waits.add(wait)
                try:
                    return await answer
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
            why = share.attempts.why_lost()
            raise GenerationLost(f"{name} broke off ({error}); {why}", replica=name) from error
        metrics.REISSUED.inc()
        share.stay.stop()

    async def _place(self, share: Share) -> Replica:
        """Waits for a replica that takes the share, and counts its load there from this moment."""
        want = share.want

        def choose(candidates: list[Candidate]) -> Replica:
            return self._seat(share, self._policy(want.model_id).choose(candidates, want.ask or Ask()))

        return await self._placed(want, share.attempts, share.deadline, choose)

    async def _split(self, want: Want, stay: Stay, shares: list[Share]) -> None:
        """Waits for replicas that fit, adds the shares, and counts the load of each from this moment."""
        deadline = self.clock() + want.deadline_seconds

        def split(candidates: list[Candidate]) -> list[Share]:
            for one in self._policy(want.model_id).split(candidates, want.ask or Ask()):
                first = sum(share.count for share in shares)
                shares.append(Share(want.narrowed(one.num_samples), first, one.num_samples, stay, deadline))
                self._seat(shares[-1], one.name)
            assert sum(share.count for share in shares) == want.num_samples, "the policy split something else"
            return shares

        await self._placed(want, Attempts.none(), deadline, split)

    def _seat(self, share: Share, name: str) -> Replica:
        replica = self.table.get(name)
        assert replica is not None, f"the policy chose {name}, which is no candidate"
        self.table.dispatched(name, share.want.num_tokens, share.count)
        self.verdicts.started(name, self.clock())
        share.stay.start()
        share.attempts.tried.append(name)
        share.replica, share.info = replica, replica.info
        share.load, share.num_open = share.want.num_tokens, share.count
        return replica

    def _leave(self, share: Share) -> None:
        if share.replica is not None and share.info is not None:
            self.table.answered(share.replica.info.name, share.load, share.num_open)
            self.verdicts.ended(share.info, share.verdict, self.clock())
            share.replica, share.load, share.num_open, share.verdict = None, 0, 0, None
            self.waiting_room.serve(*self.table.models_beside(share.info))

    def _policy(self, model_id: str) -> RoutingPolicy:
        if model_id not in self._policies:
            self._policies[model_id] = self.new_policy()
        return self._policies[model_id]

    async def _placed(
        self, want: Want, attempts: Attempts, deadline: float, place: Callable[[list[Candidate]], T]
    ) -> T:
        """What `place` makes of the replicas that fit, as soon as some do. Time while the fleet is paused, or while the
        version that was asked for is on its way, does not count as waiting for one: only the deadline bounds it.
        """
        waited_seconds = 0.0
        while True:
            started = self.clock()
            alone = self.waiting_room.is_empty(want.model_id)
            if alone and (placed := self._placed_now(want, attempts, place)) is not None:
                return placed
            paused = self.fleet.holds(want.model_id, begins=want.begins)
            left = deadline - started
            if self.full_at_capacities and not paused and fitting(self.table, want, attempts.tried):
                try:
                    return await self.waiting_room.turn(
                        want, deadline, max(0.0, left), lambda: self._placed_in_turn(want, attempts, place)
                    )
                except NoTurn:
                    continue
            bounded = not paused and not is_syncing(self.table, want)
            patience = min(left, self.replica_wait_seconds - waited_seconds) if bounded else left
            if patience <= 0 or not await self.changes.wait(patience):
                raise self._nobody(want, deadline - want.deadline_seconds)
            waited_seconds += self.clock() - started if bounded else 0.0

    def _placed_now(self, want: Want, attempts: Attempts, place: Callable[[list[Candidate]], T]) -> T | None:
        """What `place` makes of the replicas that fit and have room; None while there are none."""
        if want.given_up():
            raise GivenUp
        if self.fleet.holds(want.model_id, begins=want.begins):
            return None
        fit = fitting(self.table, want, attempts.tried)
        found = [one for one in fit if one.has_room(self.full_at_capacities)]
        if not found:
            return None
        return place([one.candidate() for one in self.verdicts.preferred(want, found, self.clock())])

    def _placed_in_turn(self, want: Want, attempts: Attempts, place: Callable[[list[Candidate]], T]) -> T | None:
        """Likewise; raises NoTurn when it is not room that is missing, so that it is in nobody's way meanwhile."""
        placed = self._placed_now(want, attempts, place)
        held = self.fleet.holds(want.model_id, begins=want.begins)
        if placed is None and (held or not fitting(self.table, want, attempts.tried)):
            raise NoTurn
        return placed

    def _has_room(self, model_id: str) -> bool:
        return not self.fleet.is_paused(model_id) and self.table.with_room(model_id, self.full_at_capacities)

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
