"""The LoRA adapters of a learner's model and the order of everything that is done to them.

An adapter's operations are numbered and answered like the model's. Backward passes of different adapters that wait at
the same time are computed together: one pass over the base serves them all.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from reflux_model.lora import LoraSpec
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import write_tensors
from reflux_trainer.learner.adapter_state import capture, restore_adapter
from reflux_trainer.learner.core import AdapterJob
from reflux_trainer.learner.host import LearnerHost, Saved, Session
from reflux_trainer.learner.journal import Figures, Journal, OutOfOrderError
from reflux_trainer.learner.lora import KEPT_ANSWERS, LoraAdapter
from reflux_trainer.learner.ops import BatchFigures, GroupData, LossSpec, StepSpec


@dataclass(frozen=True)
class _Waiting:
    """A backward pass that nobody has begun."""

    session: Session
    name: str
    op_id: int
    groups: Sequence[GroupData]
    loss: LossSpec
    answer: asyncio.Future[BatchFigures]


class AdapterHost:
    """Does to adapters what `LearnerHost` does to the model, in the same torch thread and under the same lock."""

    def __init__(self, host: LearnerHost) -> None:
        self._host = host
        self._waiting: list[_Waiting] = []

    async def create(self, model_id: str, name: str, spec: LoraSpec, seed: int) -> LoraAdapter:
        """A fresh adapter as operation 0; one of this name is forgotten. Raises `UnsupportedModelError`."""
        session = self._host.require(model_id)
        return await self._host.finish(self._create(session, name, spec, seed))

    async def drop(self, model_id: str, name: str) -> None:
        """Forgets an adapter, known or not."""
        async with self._host.order:
            self._host.require(model_id).adapters.pop(name, None)

    async def forward_backward(
        self, model_id: str, name: str, op_id: int, groups: Sequence[GroupData], loss: LossSpec
    ) -> BatchFigures:
        """Adds the gradient of one batch once; repeated calls get the first answer. Raises `OutOfOrderError`."""
        session = self._host.require(model_id)
        session.adapter(name)
        waiting = _Waiting(session, name, op_id, groups, loss, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        return await self._host.finish(self._forward_backward(waiting))

    async def optim_step(self, model_id: str, name: str, op_id: int, step: StepSpec) -> Figures:
        """Steps the adapter once, as above."""
        return await self._host.finish(self._step(self._host.require(model_id), name, op_id, step))

    async def rescore(
        self,
        model_id: str,
        name: str,
        groups: Sequence[GroupData],
        loss: LossSpec | None,
        *,
        reference: bool = False,
        values: bool = False,
    ) -> BatchFigures:
        """Log-probs of an adapter or (no name) the model, of its reference, or values, behind earlier operations."""
        session = self._host.require(model_id)
        async with self._host.order:
            self._host.check_present(session)
            adapter = session.adapter(name) if name else None
            learner = session.learner
            return await self._host.in_torch(
                lambda: learner.rescored(groups, adapter, loss, reference=reference, values=values)
            )

    async def save(self, model_id: str, name: str, store: ObjectStore, key: str, *, weights_only: bool) -> Saved:
        """Streams an adapter's state; operations wait only while it is copied."""
        session, started = self._host.require(model_id), time.monotonic()
        async with self._host.order:
            self._host.check_present(session)
            adapter, begun = session.adapter(name), time.monotonic()
            sources = await self._host.in_torch(lambda: capture(adapter, weights_only=weights_only))
            op_id, version, pause = adapter.journal.last, adapter.version, time.monotonic() - begun
        receipt = await asyncio.to_thread(write_tensors, store, key, sources)
        return Saved((receipt,), op_id, version, pause, time.monotonic() - started)

    async def load(
        self,
        model_id: str,
        name: str,
        stored: tuple[ObjectStore, str],
        op_id: int,
        *,
        weights_only: bool,
        epoch: int = 0,
    ) -> LoraAdapter:
        """Puts a stored state in the adapter's place, as its operation `op_id` (0: as the one that was saved).

        Above 0, `epoch` is one that the model's publishes have passed: they go on behind it.
        """
        session = self._host.require(model_id)
        config = session.whole.config
        loaded = await asyncio.to_thread(restore_adapter, *stored, config, weights_only=weights_only)
        if epoch:
            session.publisher.restored(epoch)
        return await self._host.finish(self._load(session, name, loaded, op_id))

    async def _create(self, session: Session, name: str, spec: LoraSpec, seed: int) -> LoraAdapter:
        async with self._host.order:
            self._host.check_present(session)
            adapter = await self._host.in_torch(LoraAdapter.fresh, session.whole.config, spec, seed)
            session.adapters[name] = adapter
            return adapter

    async def _load(self, session: Session, name: str, loaded: LoraAdapter, op_id: int) -> LoraAdapter:
        async with self._host.order:
            self._host.check_present(session)
            if op_id:
                present = session.adapters.get(name)
                if present is not None and not present.journal.may_load(op_id):
                    raise OutOfOrderError(f"loading cannot be operation {op_id} behind {present.journal.last}")
                loaded.journal = Journal(op_id, KEPT_ANSWERS)
            session.adapters[name] = loaded
            return loaded

    async def _step(self, session: Session, name: str, op_id: int, step: StepSpec) -> Figures:
        async with self._host.order:
            self._host.check_present(session)
            adapter = session.adapter(name)
            known = adapter.journal.recall(op_id, "optim_step")
            if known is not None:
                return known
            figures = await self._host.in_torch(adapter.optim_step, step)
            adapter.journal.record(op_id, "optim_step", figures)
            return figures

    async def _forward_backward(self, waiting: _Waiting) -> BatchFigures:
        async with self._host.order:
            if not waiting.answer.done():
                self._waiting.remove(waiting)
                await self._compute(waiting)
        return waiting.answer.result()

    async def _compute(self, first: _Waiting) -> None:
        """Answers `first`, and with it what other adapters wait for and may be done now."""
        self._host.check_present(first.session)
        known = first.session.adapter(first.name).journal.recall(first.op_id, "forward_backward")
        if known is not None:
            assert isinstance(known, BatchFigures)
            first.answer.set_result(known)
            return
        chosen = [first, *self._others(first)]
        jobs = [AdapterJob(each.session.adapters[each.name], each.groups, each.loss) for each in chosen]
        try:
            computed = await self._host.in_torch(first.session.whole.adapters_forward_backward, jobs)
        except Exception as error:  # Each caller waits for its own answer.
            for each in chosen:
                each.answer.set_exception(error)
            return
        for each, job, figures in zip(chosen, jobs, computed, strict=True):
            job.adapter.journal.record(each.op_id, "forward_backward", figures)
            each.answer.set_result(figures)

    def _others(self, first: _Waiting) -> list[_Waiting]:
        """Takes one waiting pass of every other adapter whose next operation it is."""
        chosen: dict[str, _Waiting] = {}
        for each in self._waiting:
            adapter = first.session.adapters.get(each.name) if each.session is first.session else None
            if (
                adapter is not None
                and each.name not in (first.name, *chosen)
                and each.op_id == adapter.journal.last + 1
            ):
                chosen[each.name] = each
        for each in chosen.values():
            self._waiting.remove(each)
        return list(chosen.values())
