"""Runs the operations of one model in the order of their numbers, once each, across deaths of learner and trainer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import RedisError

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_kit.errors import InvalidRequest, NotFound, ServiceError, Unavailable
from reflux_storage.errors import StorageError
from reflux_trainer.tinker import metrics
from reflux_trainer.tinker.blobs import Blobs
from reflux_trainer.tinker.futures import FutureTable, Outcome
from reflux_trainer.tinker.link import LearnerGone, LearnerLink, Refused
from reflux_trainer.tinker.operations import CHANGES_STATE, CREATE, LOAD, Done, Operations
from reflux_trainer.tinker.records import Model, Progress

if TYPE_CHECKING:
    from reflux.trainer.v1.learner_service_pb2_grpc import LearnerServiceAsyncStub

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_RETRY_SECONDS = 0.3
_CALL_SECONDS = 30.0
_MAX_LEARNERS = 5
"""Learners that one operation may lose before it fails: it is most likely what ends them."""


class ModelWorker:
    """Owns the order of one model. Learner calls of all models of a base are the learner's to arrange."""

    def __init__(
        self,
        model: Model,
        link: LearnerLink,
        operations: Operations,
        futures: FutureTable,
        blobs: Blobs,
        *,
        max_logged: int,
        make_room: Callable[["ModelWorker"], Awaitable[None]],
        closed: bool = False,
    ) -> None:
        """`make_room` is awaited before the learner takes the adapter in; a `closed` worker never begins."""
        self.model, self._make_room = model, make_room
        self._link, self._operations, self._futures, self._blobs = link, operations, futures, blobs
        self._max_logged = max_logged
        self._arrived = asyncio.Event()
        self._prepared = ""
        """Incarnation of the learner that holds the adapter at the model's progress; "" when that is not known."""
        self._task: asyncio.Task[None] | None = None
        self._executing = asyncio.Lock()
        self._closed = closed
        self.used_at = time.monotonic()
        self.reason = ""
        self.paused = False

    @property
    def loaded(self) -> bool:
        """Whether a learner holds the adapter."""
        return bool(self._prepared)

    @property
    def idle(self) -> bool:
        """Whether nothing is being executed."""
        return not self._executing.locked()

    def wake(self) -> None:
        """There may be something to do. What comes while the trainer stops is left to the next one."""
        self.used_at = time.monotonic()
        self._arrived.set()
        if self._closed:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"tinker {self.model.model_id}")

    async def close(self) -> None:
        """Stops; open futures stay logged."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._arrived.clear()
            try:
                async with self._executing:
                    progress = await self._futures.progress(self.model.model_id)
                    found = await self._futures.payload(self.model.model_id, progress.next_seq)
                    if found is not None:
                        await self._step(progress, *found)
                        continue
                    if await self._futures.is_done(self.model.model_id, progress.next_seq):  # given up behind a gap
                        skipped = replace(progress, next_seq=progress.next_seq + 1)
                        await self._futures.move(self.model.model_id, progress, skipped)
                        continue
                open_seqs = await self._futures.open_seqs(self.model.model_id)
            except (RedisError, StorageError) as error:
                self._say(f"the state store does not answer ({type(error).__name__})")
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except Exception:  # the boundary of the task: the operation stays logged and is tried again
                log.exception("model %s", self.model.model_id)
                self._say("internal error; it is tried again, the trainer's log says more")
                await asyncio.sleep(10 * _RETRY_SECONDS)
                continue
            self._say(
                f"waits for operation {progress.next_seq}, which has not arrived" if open_seqs else "", paused=False
            )
            await self._arrived.wait()

    async def _step(self, progress: Progress, kind: str, payload: bytes) -> None:
        seq_id, op_id = progress.next_seq, progress.op_id + 1 if kind in CHANGES_STATE else 0
        with metrics.OPERATION_SECONDS.labels(metrics.KINDS[kind]).time():
            done = await self._attempted(progress, kind, payload, seq_id, op_id)
        after = self._operations.moved(progress, seq_id, done)
        # A load is covered by the state that it saved: it is not in the log.
        logged = done.op_id if kind != LOAD else 0
        await self._futures.finish(self.model.model_id, seq_id, done.outcome, after, logged)
        if done.saved is not None:
            await self._covered(progress, after, after)
        elif after.op_id - after.saved_op_id >= self._max_logged:
            await self._save(after)

    async def _attempted(self, progress: Progress, kind: str, payload: bytes, seq_id: int, op_id: int) -> Done:
        lost = 0
        while True:
            try:
                await self._prepare(progress, fresh=kind == CREATE or (kind == LOAD and not progress.op_id))
                self._say("is being computed", paused=False)
                return await self._operations.execute(kind, payload, seq_id, op_id, self._call)
            except LearnerGone as error:
                self._prepared, lost = "", lost + 1
                if lost >= _MAX_LEARNERS:
                    text = f"the learner was lost {lost} times during this operation, the last time with: {error}"
                    return Done(Outcome(text.encode(), failed="server"))
                self._say(f"the learner starts again ({error})")
            except Unavailable as error:
                self._say(str(error))
            except (InvalidRequest, NotFound) as error:
                return Done(Outcome(str(error).encode(), failed="user"))
            except Refused as error:
                if not error.transient:
                    return Done(Outcome(str(error).encode(), failed="user" if error.user else "server"))
                self._say(str(error))
            except ServiceError as error:
                return Done(Outcome(str(error).encode(), failed="server"))
            await asyncio.sleep(_RETRY_SECONDS)

    async def _prepare(self, progress: Progress, *, fresh: bool) -> None:
        """Makes sure that the learner holds the adapter as it was behind the last recorded operation."""
        if not self._link.incarnation:
            self._say(f"the base model {self.model.base_model} is being loaded")
        incarnation = await self._link.ready()
        if self._prepared == incarnation:
            return
        await self._make_room(self)
        if fresh:
            self._prepared = incarnation
            return
        status = await self._call(lambda stub: stub.GetLearner(pb.GetLearnerRequest(), timeout=_CALL_SECONDS))
        at = {adapter.name: adapter.op_id for adapter in status.adapters}.get(self.model.adapter)
        # One further: the trainer ended between an operation and its record; the learner repeats the answer.
        if at is None or not progress.op_id <= at <= progress.op_id + 1:
            self._say("the model is being restored")
            logged = await self._futures.logged(self.model.model_id, progress.saved_op_id, progress.op_id)
            log.info("%s: state of operation %d and %d more", self.model.model_id, progress.saved_op_id, len(logged))
            await self._operations.recover(progress, logged, self._call)
        self._prepared = incarnation

    async def give_up_gaps(self) -> None:
        """Fails the operations behind one that never arrived: its client has gone."""
        open_seqs = await self._futures.open_seqs(self.model.model_id)
        # Read after them: what ended in between is not taken for missing.
        expected = (await self._futures.progress(self.model.model_id)).next_seq
        for seq_id in open_seqs:
            if seq_id == expected:
                expected += 1
            elif seq_id > expected:
                text = f"the session ended and operation {expected} never arrived"
                await self._futures.finish(self.model.model_id, seq_id, Outcome(text.encode(), failed="user"))

    async def _call(self, send: Callable[["LearnerServiceAsyncStub"], Awaitable[Answer]]) -> Answer:
        return await self._link.call(send)

    async def _save(self, progress: Progress) -> None:
        """Saves the state, so that a recovery is short; when that fails the log only grows."""
        try:
            saved = await self._operations.save_state("recovery", self._call)
        except (LearnerGone, Refused) as error:
            log.warning("the recovery state of %s was not saved: %s", self.model.model_id, error)
            return
        after = replace(progress, saved_op_id=progress.op_id, recovery=asdict(saved))
        await self._covered(progress, progress, after)

    async def _covered(self, before: Progress, stored: Progress, after: Progress) -> None:
        """Moves from the `stored` progress to `after`; the recovery state of `before` is not needed then."""
        if await self._futures.move(self.model.model_id, stored, after):
            await self._blobs.drop(key for key, *_ in before.recovery_weights.objects)

    async def unload(self) -> None:
        """Frees the adapter at the learner, its state saved, unless it is used; the next operation fetches it back."""
        if not self.idle or not self.loaded:  # no waiting: another model's operation may be what asks for the room
            return
        async with self._executing:
            progress = await self._futures.progress(self.model.model_id)
            if progress.op_id > progress.saved_op_id:
                await self._save(progress)
            self._prepared = ""
            drop = pb.DropAdapterRequest(model_id=self._link.base.run, adapter=self.model.adapter)
            try:
                await self._link.call(lambda stub: stub.DropAdapter(drop, timeout=_CALL_SECONDS))
            except (LearnerGone, Refused) as error:
                log.info("%s could not be put away: %s", self.model.model_id, error)

    def _say(self, reason: str, *, paused: bool = True) -> None:
        self.reason, self.paused = reason, paused
