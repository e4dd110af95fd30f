"""One base model as the door uses it: its processes, its learner, its sampling, its models' workers."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from reflux_kit.errors import InvalidRequest
from reflux_trainer.peers import Peers
from reflux_trainer.tinker.blobs import Blobs
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.fleet import Base, Fleet
from reflux_trainer.tinker.futures import FutureTable
from reflux_trainer.tinker.link import LearnerLink
from reflux_trainer.tinker.operations import Operations
from reflux_trainer.tinker.records import Model
from reflux_trainer.tinker.sampling import SamplingDesk
from reflux_trainer.tinker.settings import TinkerSettings
from reflux_trainer.tinker.worker import ModelWorker


@dataclass
class Desk:
    """Everything of one base model; workers are made when their model is used."""

    base: Base
    fleet: Fleet
    link: LearnerLink
    sampling: SamplingDesk
    workers: dict[str, ModelWorker] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether nothing is open."""
        return not self.sampling.busy and all(worker.idle for worker in self.workers.values())

    async def make_room(self, most: int, coming: ModelWorker) -> None:
        """Puts the models that idle for longest away, so that the learner holds at most `most` with the coming one."""
        held = [worker for worker in self.workers.values() if worker.loaded and worker is not coming]
        for worker in sorted(held, key=lambda each: each.used_at)[: max(0, len(held) + 1 - most)]:
            await worker.unload()

    async def close(self) -> None:
        """Stops all work; what is open stays logged."""
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))
        await self.sampling.close()
        await self.link.close()


class Desks:
    """Owns the desks of all base models."""

    def __init__(
        self, bases: Mapping[str, Base], peers: Peers, catalog: Catalog, futures: FutureTable, blobs: Blobs,
        settings: TinkerSettings,
    ) -> None:  # fmt: skip
        self._catalog, self._futures, self._blobs, self._settings = catalog, futures, blobs, settings
        self._closed = False
        self._desks = {name: self._desk(base, peers) for name, base in bases.items()}

    def _desk(self, base: Base, peers: Peers) -> Desk:
        settings = self._settings
        fleet = Fleet(base, peers, settings.samplers_per_base, settings.weight_dtype, settings.start_seconds)
        link = LearnerLink(fleet, peers, settings.weight_dtype)
        sampling = SamplingDesk(fleet, link, peers, self._catalog, self._futures, settings, self._blobs.url)
        return Desk(base, fleet, link, sampling)

    def all(self) -> list[Desk]:
        """Every base model's desk."""
        return list(self._desks.values())

    def of(self, base_model: str) -> Desk:
        """The desk of a base model. Raises `InvalidRequest` naming those that there are."""
        desk = self._desks.get(base_model)
        if desk is None:
            known = ", ".join(sorted(self._desks))
            raise InvalidRequest(f"base_model {base_model[:80]!r} is not one of {known}", field="base_model")
        return desk

    def worker(self, model: Model) -> ModelWorker:
        """The worker of a model."""
        desk = self.of(model.base_model)
        if model.model_id not in desk.workers:
            desk.workers[model.model_id] = ModelWorker(
                model,
                desk.link,
                Operations(model, desk.base.run, self._catalog, self._blobs),
                self._futures,
                self._blobs,
                max_logged=self._settings.max_logged_operations,
                make_room=lambda coming: desk.make_room(self._settings.max_models, coming),
                closed=self._closed,
            )
        return desk.workers[model.model_id]

    async def rest(self) -> None:
        """Gives processes back of base models that idle."""
        for desk in self.all():
            if desk.idle and time.monotonic() - desk.fleet.used_at > self._settings.idle_seconds:
                await desk.fleet.stop()

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Stops all desks at the end."""
        try:
            yield
        finally:
            self._closed = True
            await asyncio.gather(*(desk.close() for desk in self.all()))
