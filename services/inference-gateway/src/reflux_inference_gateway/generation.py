"""Groups that callers wait for: from a checked call to finished samples, stopped and taken up again on the way."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from reflux.common.v1.common_pb2 import Sample
from reflux_inference_gateway import metrics
from reflux_inference_gateway.answers import Batch, aborted, generated_tokens
from reflux_inference_gateway.clients import ReplicaClients
from reflux_inference_gateway.dispatch import Dispatcher, GivenUp, Parked, Share
from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.merging import merged
from reflux_inference_gateway.partial import joined, rest
from reflux_inference_gateway.prefill_legs import HandedPrompt, PrefillLegs
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.routing.base import Ask
from reflux_inference_gateway.want import Want
from reflux_inference_gateway.wire import GroupCall, Handed
from reflux_kit.scope import run_of

log = logging.getLogger(__name__)

_NO_DEADLINE_SECONDS = 24 * 3600.0
_STOPPING_SECONDS = 0.05
"""How often running groups are told to stop: a replica may hear of the stop before it hears of the group."""
_MAX_PARKS = 100
"""Of one pause: 5 s and what the replicas take to answer."""
_MAX_STOPS = 20
"""Of one abort: a replica that has not stopped a group by then does not listen; its end is seen by its heartbeat."""


@dataclass(eq=False)
class Generation:
    """One group that a caller waits for: which replicas have parts of it, and what came of the samples so far."""

    call: GroupCall
    dispatcher: Dispatcher
    clients: ReplicaClients
    prompt: HandedPrompt
    seconds_left: Callable[[], float | None]
    """Until the caller's deadline; None when there is none."""
    is_aborted: bool = False
    _missing: set[int] = field(default_factory=set)
    _pieces: dict[int, Sample] = field(default_factory=dict)
    """Samples that were stopped and shall go on."""
    _live: dict[Share, ReplicaClient] = field(default_factory=dict)
    _parking: set[Share] = field(default_factory=set)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Finished samples as they come; what was aborted while it waited for a replica comes last."""
        self._missing = set(range(self.call.num_samples))
        try:
            async with aclosing(self.dispatcher.stream_group(self._want(), self._send)) as batches:
                async for batch in batches:
                    yield batch
        except GivenUp:
            left = [self._pieces.get(index) or Sample(index=index) for index in sorted(self._missing)]
            yield "", aborted(left)

    async def abort(self) -> None:
        """Ends it at its replicas, or where it waits."""
        self.is_aborted = True
        self.dispatcher.changes.notify()
        for _ in range(_MAX_STOPS):
            await self._stop()
            if not self.is_live:
                return
            await self.dispatcher.changes.wait(_STOPPING_SECONDS)

    async def park(self) -> None:
        """Stops it at its replicas; what is missing goes on when the fleet is resumed."""
        self._parking.update(self._live)
        await self._stop()

    @property
    def is_live(self) -> bool:
        """True while a replica has a part of it."""
        return bool(self._live)

    async def _stop(self) -> None:
        clients = {id(client): client for client in self._live.values()}
        await asyncio.gather(*(client.abort(self.call.request_id) for client in clients.values()))

    async def _send(self, replica: Replica, share: Share) -> AsyncGenerator[Batch, None]:
        handed = None if self._pieces else await self.prompt.handed(replica, share.count)
        if self.is_aborted:
            raise GivenUp
        if self.dispatcher.fleet.is_parked(self.call.model_id):
            raise Parked
        self._parking.discard(share)
        client = self._live[share] = self.clients.get(replica.info)
        try:
            share.attempts.pulling = handed is not None
            async with aclosing(self._samples(client, replica, share, handed)) as batches:
                async for samples in batches:
                    if finished := self._sift(share, samples):
                        self.dispatcher.finished(share, len(finished), generated_tokens(finished))
                        metrics.count_samples(self.call.model_id, finished)
                        yield replica.info.name, finished
            if share in self._parking and self._left(share):
                raise Parked
        finally:
            del self._live[share]

    def _samples(
        self, client: ReplicaClient, replica: Replica, share: Share, handed: Handed | None
    ) -> AsyncGenerator[Sequence[Sample], None]:
        """All samples of the share in one call; once some have begun, each of the rest in a call of its own."""
        seconds, left = self.seconds_left(), self._left(share)
        if not self._pieces.keys() & set(left):
            whole = len(left) == self.call.num_samples
            part = self.call if whole else self.call.share(share.first, share.count)
            return client.generate(replace(part, handed=handed), seconds, replica.version)
        pieces = [self._pieces.get(index) or Sample(index=index) for index in left]
        return merged([client.generate(rest(self.call, piece), seconds, replica.version) for piece in pieces])

    def _sift(self, share: Share, samples: Sequence[Sample]) -> Sequence[Sample]:
        """What is finished; what was stopped for a pause is kept."""
        if not (self._pieces or share in self._parking):
            self._missing.difference_update(sample.index for sample in samples)
            return samples
        finished = []
        for sample in samples:
            before = self._pieces.pop(sample.index, None)
            whole = sample if before is None else joined(before, sample)
            stopped = whole.finish_reason == "abort" and share in self._parking and not self.is_aborted
            if stopped and len(whole.token_ids) < self.call.sampling.max_tokens:
                self._pieces[whole.index] = whole
            else:
                self._missing.discard(whole.index)
                finished.append(whole)
        return finished

    def _left(self, share: Share) -> list[int]:
        return [index for index in range(share.first, share.first + share.count) if index in self._missing]

    def _want(self) -> Want:
        call, seconds = self.call, self.seconds_left()
        newest = self.dispatcher.table.newest_version(call.model_id)
        return Want(
            model_id=call.model_id,
            num_tokens=call.num_tokens,
            min_version=call.min_version,
            max_lag=call.max_lag,
            version=call.version,
            session=call.session,
            tenant=call.tenant,
            priority=call.priority,
            begins=not call.continues,
            ask=Ask(
                num_samples=call.num_samples,
                prompt=call.prompt_token_ids,
                num_prompt_tokens=len(call.prompt_token_ids),
                max_tokens=call.sampling.max_tokens,
                session=call.session,
                run=call.model_id,
                salt=str(newest if call.version is None else call.version),
            ),
            deadline_seconds=_NO_DEADLINE_SECONDS if seconds is None else seconds,
            given_up=lambda: self.is_aborted,
        )


@dataclass
class Generations:
    """Owns the groups that callers wait for at this moment."""

    dispatcher: Dispatcher
    clients: ReplicaClients
    legs: PrefillLegs
    _running: list[Generation] = field(default_factory=list)

    @contextmanager
    def new(self, call: GroupCall, seconds_left: Callable[[], float | None]) -> Iterator[Generation]:
        """One more, until the block ends. Ids need not differ: a caller that lost its connection may repeat the call
        before the first one is seen to be gone.
        """
        prompt = HandedPrompt(self.legs, call)
        one = Generation(call, self.dispatcher, self.clients, prompt, seconds_left)
        self._running.append(one)
        try:
            yield one
        finally:
            prompt.close()
            self._running.remove(one)

    async def abort(self, *, request_id: str = "", session: str = "", group: str = "", run: str = "") -> int:
        """Ends those that match every word that is not empty; returns how many."""

        def matches(call: GroupCall) -> bool:
            return (
                request_id in ("", call.request_id)
                and session in ("", call.session)
                and group in ("", call.group)
                and run in ("", run_of(call.model_id))
            )

        found = [one for one in self._running if matches(one.call)]
        await asyncio.gather(*(one.abort() for one in found))
        return len(found)

    async def park(self, model_id: str) -> None:
        """Stops those of a model (all when empty) at their replicas, until no replica has a part of them. Callers that
        take nothing do not keep it: what their replicas have delivered waits here.
        """
        for _ in range(_MAX_PARKS):
            live = [one for one in self._running if one.is_live and model_id in ("", one.call.model_id)]
            if not live:
                return
            await asyncio.gather(*(one.park() for one in live))
            await self.dispatcher.changes.wait(_STOPPING_SECONDS)
        log.warning("groups that were told to stop are not seen to: their callers or replicas do not answer")
