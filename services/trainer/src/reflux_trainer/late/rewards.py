"""Late rewards as the loop sees them: what it trained provisionally, and the correction samples that are due."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc
import numpy as np

from reflux.sandbox.v1 import ladder_service_pb2 as ladder_pb
from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_runs.config import RlConfig
from reflux_trainer.advantages import loss_config, prompt_group, shaped
from reflux_trainer.algo.registry import Algorithm
from reflux_trainer.algo.rewards import Rewards, has_signal
from reflux_trainer.consume import Batch
from reflux_trainer.late.correction import CorrectionPolicy, correct, scaled
from reflux_trainer.late.store import LateStore, Trained
from reflux_trainer.queue.ledger import Cursor
from reflux_trainer.queue.records import Group, Sample

if TYPE_CHECKING:
    from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceAsyncStub

log = logging.getLogger(__name__)
_CANCEL_SECONDS = 15.0


class LateRewards(Protocol):
    """What the loop asks in every step."""

    async def operations(self, cursor: Cursor, version: int, batch: Batch) -> list[pb.ForwardBackwardRequest]:
        """Correction samples for the step behind `cursor`, one request or none; its operation id is the second one of
        the step. Raises nothing of its own."""
        ...

    async def trained(self, op_id: int, batch: Batch, advantages: Sequence[np.ndarray]) -> None:
        """The batch is about to be trained by operation `op_id`."""
        ...

    async def figures(self) -> dict[str, float]:
        """Figures of the step since the last call."""
        ...

    async def finished(self) -> None:
        """The run has taken its last step: what is still under way corrects nothing any more."""
        ...


class NoLateRewards:
    """A run that waits for its verifier: every reward is final."""

    async def operations(self, cursor: Cursor, version: int, batch: Batch) -> list[pb.ForwardBackwardRequest]:
        return []

    async def trained(self, op_id: int, batch: Batch, advantages: Sequence[np.ndarray]) -> None:
        return None

    async def figures(self) -> dict[str, float]:
        return {}

    async def finished(self) -> None:
        return None


class Corrections:
    """Late rewards of one run."""

    def __init__(self, store: LateStore, ladders: "LadderServiceAsyncStub", model_id: str, config: RlConfig) -> None:
        self._store = store
        self._ladders = ladders
        self._model_id = model_id
        self._config = config
        algorithm = cast(Algorithm, config.algorithm)  # preflight refuses the one that needs the whole step
        self._policy = CorrectionPolicy(algorithm=algorithm, max_lag=config.correction_lag)
        self._counts: Counter[str] = Counter()
        self._undone = False

    async def operations(self, cursor: Cursor, version: int, batch: Batch) -> list[pb.ForwardBackwardRequest]:
        if not self._undone:  # an earlier attempt may have died before its last step was logged
            await self._store.undo(cursor.op_id)
            self._undone = True
        settled = await self._store.settled()
        entries = await self._store.trained(settled)
        over = [index for index in settled if index not in entries and index < cursor.low_water_index]
        due: list[tuple[Trained, np.ndarray]] = []
        for index, entry in sorted(entries.items()):
            if 0 < entry.corrected_by <= cursor.op_id:
                over.append(index)  # by a step that was logged
            elif entry.op_id <= cursor.op_id:
                final = self._shaped(entry.group, settled[index])
                change = correct(entry.provisional, final, version, self._policy)
                if isinstance(change, str):
                    self._counts[change] += 1
                    over.append(index)
                else:
                    due.append((entry, change))
        await self._store.forget(over)
        due = due[: self._config.groups_per_step]
        if not due:
            return []
        self._counts["corrected"] += len(due)
        op_id = cursor.op_id + 2
        await self._store.plan([entry for entry, _ in due], op_id)
        return [self._request(op_id, due, batch)]

    def _shaped(self, group: Group, final: Rewards) -> Rewards:
        """Final rewards as they would have been trained at once; equal ones would have been filtered before shaping."""
        return shaped(group, final, self._config) if has_signal(final) else final

    def _request(
        self, op_id: int, due: Sequence[tuple[Trained, np.ndarray]], batch: Batch
    ) -> pb.ForwardBackwardRequest:
        """The difference of the advantages with truncated importance weights, on the scale of the batch's tokens."""
        loss = loss_config(self._config)
        by_token = loss.aggregation == "token_mean"
        own = sum(_size(sample, by_token) for entry, _ in due for sample in entry.group.samples)
        beside = sum(
            _size(sample, by_token)
            for group in batch.groups
            for sample, grade in zip(group.samples, group.grades, strict=True)
            if grade.known
        )
        changes = scaled([change for _, change in due], own, beside)
        groups = [
            prompt_group(entry.group, change, [True] * len(change))
            for (entry, _), change in zip(due, changes, strict=True)
        ]
        loss.name, loss.tis_cap = "reinforce", self._policy.cap
        loss.kl_coefficient, loss.own_reference = 0.0, False  # the tokens had theirs when they were trained
        return pb.ForwardBackwardRequest(op_id=op_id, model_id=self._model_id, groups=groups, loss=loss)

    async def trained(self, op_id: int, batch: Batch, advantages: Sequence[np.ndarray]) -> None:
        rows = [
            Trained(group, values.tolist(), op_id)
            for group, values in zip(batch.groups, advantages, strict=True)
            if group.provisional
        ]
        rows += [
            Trained(arrival, [0.0] * len(arrival.samples), op_id=0)
            for arrival, why in batch.dropped
            if why == "filtered" and isinstance(arrival, Group) and arrival.provisional
        ]
        await self._store.remember(rows)

    async def figures(self) -> dict[str, float]:
        counts: dict[str, Any] = {name: self._counts[name] for name in ("corrected", "too_old", "unchanged", "unknown")}
        self._counts.clear()
        waiting = await self._store.waiting()
        return {f"late/{name}": float(count) for name, count in counts.items()} | {"late/waiting": float(waiting)}

    async def finished(self) -> None:
        await cancel_ladders(self._ladders, self._model_id, self._config)


async def cancel_ladders(ladders: "LadderServiceAsyncStub", run: str, config: RlConfig) -> None:
    """Cancels what is under way on the ladder for a run that has ended; an error is logged, not raised."""
    if config.release == "full":
        return
    try:
        await ladders.CancelLadders(ladder_pb.CancelLaddersRequest(run=run), timeout=_CANCEL_SECONDS)
    except grpc.aio.AioRpcError as error:  # they end by their deadlines too
        log.warning("ladders of %s go on after its end: %s", run, error.code().name)


def _size(sample: Sample, by_token: bool) -> int:
    """What the aggregation of the loss divides by: tokens, or sequences."""
    return len(sample.token_ids) if by_token else int(bool(sample.token_ids))
