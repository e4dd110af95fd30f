"""Checkpoints of a run: begin, stream the learner's state, commit with the loop's cursor, beside the loop."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import grpc

from reflux.checkpoint.v1 import checkpoint_pb2
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux_trainer.learner_client import LearnerClient, LearnerFailed
from reflux_trainer.queue.ledger import Cursor, Ledger
from reflux_trainer.watchdog import Waits

log = logging.getLogger(__name__)

METHODS = tuple(
    f"reflux.checkpoint.v1.CheckpointService/{name}"
    for name in ("BeginCheckpoint", "CommitCheckpoint", "AbortCheckpoint", "GetLatestCheckpoint", "ScrubCheckpoint")
)
"""Idempotent methods that the channel may repeat."""
_SCRUB_SECONDS = 600.0
MAX_KEPT_OPERATIONS = 4000
"""Operations in the log beyond which people are warned: Redis keeps them, and a recovery replays them all."""
_KEPT = 20

if TYPE_CHECKING:
    from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceAsyncStub


class DatasetChanged(ValueError):
    """The checkpoint was made with another task, seed or split."""


class CheckpointsAway(RuntimeError):
    """The catalog of checkpoints does not answer, so that a start from nothing would be a guess."""


class CutMoved(RuntimeError):
    """The learner's state does not belong to the cursor, so the two cannot be one checkpoint."""


@dataclass(frozen=True)
class _Due:
    cursor: Cursor
    version: int
    epoch: int


class Checkpoints:
    """Writes checkpoints in the background. A failed one is reported and training goes on; the operation log stays."""

    def __init__(
        self,
        stub: "CheckpointServiceAsyncStub",
        ledger: Ledger,
        waits: Waits,
        *,
        run: str,
        attempt: int,
        fingerprint: str,
        warn: Callable[[str], Awaitable[None]],
        origin: str = "",
    ) -> None:
        """`origin`: a checkpoint of another run, which stands in as long as this run has none of its own."""
        self._stub = stub
        self._learner: LearnerClient | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._on_commit: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._ledger = ledger
        self._waits = waits
        self._run = run
        self._attempt = attempt
        self._fingerprint = fingerprint
        self._origin = origin
        self._saved: asyncio.Event = asyncio.Event()
        self._saved.set()
        self._running: asyncio.Task[None] | None = None
        self._covered: int | None = None
        """Operation of the newest checkpoint that this attempt committed."""
        self._trimmed = 0
        self._warn_at = MAX_KEPT_OPERATIONS
        self._warn = warn
        self._failed = 0
        self._unseen: list[str] = []
        self.failures: deque[str] = deque(maxlen=_KEPT)
        self.committed: deque[str] = deque(maxlen=_KEPT)

    def attach(
        self,
        learner: LearnerClient,
        tasks: asyncio.TaskGroup,
        trimmed_op_id: int,
        on_commit: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Gives it what writing needs; reading needs none of it.

        `trimmed_op_id` is where the operation log begins; `on_commit` runs beside the loop after every commit, must not
        raise and must end by itself.
        """
        self._learner, self._tasks, self._trimmed, self._on_commit = learner, tasks, trimmed_op_id, on_commit

    def drain_failures(self) -> list[str]:
        """Failures since the last call."""
        unseen, self._unseen = self._unseen, []
        return unseen

    async def check_log(self, op_id: int) -> None:
        """Warns when the operation log has grown long; `op_id` is the last logged one."""
        kept = op_id - self._trimmed
        if kept >= self._warn_at:
            self._warn_at = 2 * kept
            text = f"the operation log holds {kept} operations, which a recovery replays: no checkpoint covers them"
            log.warning("%s of %s", text, self._run)
            await self._warn(text)

    async def latest(self) -> checkpoint_pb2.Checkpoint | None:
        """The newest intact checkpoint, else the one it was forked from. Raises DatasetChanged or CheckpointsAway."""
        checkpoint = await self._found()
        if checkpoint is None:
            return None
        found = checkpoint.cursor.dataset_fingerprint
        if found and found != self._fingerprint:
            raise DatasetChanged(
                f"{checkpoint.name} was made with another task, seed or split (fingerprint {found}, this run has "
                f"{self._fingerprint}): resume with the configuration of that run"
            )
        return checkpoint

    async def _found(self) -> checkpoint_pb2.Checkpoint | None:
        newest = pb.GetLatestCheckpointRequest(run=self._run)
        try:
            return (await self._stub.GetLatestCheckpoint(newest, timeout=30.0, wait_for_ready=True)).checkpoint
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise away(error) from None
        if not self._origin:
            return None
        try:
            return (await self._stub.GetCheckpoint(pb.GetCheckpointRequest(name=self._origin), timeout=30.0)).checkpoint
        except grpc.aio.AioRpcError as error:
            raise away(error) from None

    async def latest_readable(self) -> checkpoint_pb2.Checkpoint | None:
        """The newest checkpoint whose objects were all read back; for a start that has nothing else to go by."""
        while True:
            found = await self.latest()
            if found is None or not await self.scrub(found.name):
                return found
            if found.name == self._origin:
                raise CheckpointsAway(f"{found.name}, which the run was forked from, is damaged: fork another one")
            log.error("%s is damaged, looking for an older one", found.name)

    async def scrub(self, name: str) -> bool:
        """Has a checkpoint read back; True when it is damaged: `latest` then leaves it out. Raises CheckpointsAway."""
        try:
            answer = await self._stub.ScrubCheckpoint(pb.ScrubCheckpointRequest(name=name), timeout=_SCRUB_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise away(error) from None
        return bool(answer.damaged_keys)

    async def start(self, cursor: Cursor, version: int, epoch: int) -> None:
        """Begins a checkpoint of the state behind `cursor`; an earlier one ends first."""
        await self.finished()
        assert self._tasks is not None
        self._saved.clear()
        self._running = self._tasks.create_task(self._write(_Due(cursor, version, epoch)), name="checkpoint")

    async def settled(self) -> None:
        """Returns when the learner may take operations again: the state that is being written is out of its hands."""
        if not self._saved.is_set():
            with self._waits.on("checkpoint", "the learner to stream its state to the object store"):
                await self._saved.wait()

    async def finished(self) -> None:
        """Returns when no checkpoint is under way."""
        if self._running is not None and not self._running.done():
            with self._waits.on("checkpoint", "the checkpoint service to commit"):
                await asyncio.wait([self._running])

    async def _write(self, due: _Due) -> None:
        try:
            begin = pb.BeginCheckpointRequest(
                request_id=str(uuid4()), run=self._run, step=due.version, attempt=self._attempt
            )
            begun = await self._stub.BeginCheckpoint(begin, timeout=30.0)
            await self._save_and_commit(begun, due)
        except (grpc.aio.AioRpcError, LearnerFailed, CutMoved) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.ALREADY_EXISTS:
                log.info("a checkpoint at version %d is committed already: %s", due.version, error.details())
                return
            text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._failed += 1
            failure = f"step {due.cursor.step}: {text}"
            self.failures.append(failure)
            self._unseen.append(failure)
            log.error("checkpoint at version %d failed, training goes on: %s", due.version, text)
            await self._warn(f"{self._failed} checkpoints failed, the last one at {failure}")
        finally:
            self._saved.set()

    async def _save_and_commit(self, begun: pb.BeginCheckpointResponse, due: _Due) -> None:
        assert self._learner is not None
        saved = await self._learner.save_state(begun.store_url, begun.prefix)
        self._saved.set()
        if saved.op_id != due.cursor.op_id:
            await self._stub.AbortCheckpoint(pb.AbortCheckpointRequest(name=begun.checkpoint.name), timeout=30.0)
            raise CutMoved(f"the state is behind operation {saved.op_id}, not {due.cursor.op_id}")
        cursor = to_message(due.cursor, due.version, due.epoch, self._fingerprint)
        commit = pb.CommitCheckpointRequest(name=begun.checkpoint.name, objects=saved.objects, cursor=cursor)
        await self._stub.CommitCheckpoint(commit, timeout=120.0)
        self.committed.append(begun.checkpoint.name)
        assert self._tasks is not None
        assert self._on_commit is not None
        self._tasks.create_task(self._on_commit(), name="tell of the checkpoint")
        # The newest one may turn out to be damaged: the one before it must stay replayable.
        if self._covered is not None:
            await self._ledger.trim(self._covered)
            self._trimmed, self._warn_at = self._covered, MAX_KEPT_OPERATIONS
        self._covered = saved.op_id
        log.info("committed %s at version %d", begun.checkpoint.name, due.version)


def away(error: grpc.aio.AioRpcError) -> CheckpointsAway:
    """What a call to the catalog that failed means to a run."""
    return CheckpointsAway(f"the checkpoint service answered {error.code().name}: {error.details()}")


def to_message(cursor: Cursor, version: int, epoch: int, fingerprint: str) -> checkpoint_pb2.LoopCursor:
    """The cut as it is stored: batches are consumed in order, so that everything below `low_water_index` is closed."""
    return checkpoint_pb2.LoopCursor(
        step=cursor.step,
        warmup_step=cursor.warmup_step,
        version=version,
        epoch=epoch,
        next_prompt_index=cursor.next_prompt_index,
        low_water_index=cursor.low_water_index,
        op_id=cursor.op_id,
        dataset_fingerprint=fingerprint,
    )


def from_message(message: checkpoint_pb2.LoopCursor) -> Cursor:
    """The first cursor of a run that goes on from a checkpoint on an empty Redis: prompts of the cut are closed."""
    return Cursor(
        step=message.step,
        warmup_step=message.warmup_step,
        op_id=message.op_id,
        next_prompt_index=message.low_water_index,
        low_water_index=message.low_water_index,
        base_index=message.low_water_index,
        base_step=message.step,
        trimmed_op_id=message.op_id,
    )
