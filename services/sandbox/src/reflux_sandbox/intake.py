"""The way of every new job into the store, whoever asks for it: parsed, with canonical answers, and somebody woken."""

import asyncio
from collections.abc import Sequence

from reflux_sandbox import metrics
from reflux_sandbox.creation import CreationParser
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.jobs import Job, JobSpec
from reflux_sandbox.keys import AnswerKeys
from reflux_sandbox.store import VerificationStore


class Intake:
    """Creates jobs."""

    def __init__(self, store: VerificationStore, dispatcher: Dispatcher, keys: AnswerKeys) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._keys = keys

    def parser(self) -> CreationParser:
        """A parser that knows what is installed now."""
        return CreationParser(self._dispatcher.verifiers, self._dispatcher.queue_of)

    async def create(self, specs: Sequence[JobSpec]) -> list[Job]:
        """Stores jobs in their order; a known request id gives its job. Raises CapacityExhausted."""
        filled = await asyncio.gather(*(self.with_canonical(spec) for spec in specs))
        created = await self._store.create_many(filled)
        for spec, (how, _) in zip(specs, created, strict=True):
            metrics.JOBS.labels(how).inc()
            if how == "queued":
                self._dispatcher.wake(spec.queue, spec.verifier)
        return [job for _, job in created]

    async def with_canonical(self, spec: JobSpec) -> JobSpec:
        """The job with what its answers are equal to; each answer of an external one stands for itself."""
        info = self._dispatcher.verifiers.get(spec.verifier)
        return spec if info is None else await self._keys.filled(spec, info)
