"""The ladder's way to verification jobs: the same store, cache and queues that every other caller uses."""

from collections.abc import Sequence
from uuid import NAMESPACE_OID, uuid5

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux_kit.errors import NotFound
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.intake import Intake
from reflux_sandbox.jobs import Job, JobSpec
from reflux_sandbox.ladder.release import Rung
from reflux_sandbox.ladder.state import FULL, LadderSpec
from reflux_sandbox.messages import parse_uuid
from reflux_sandbox.records import job_id_of
from reflux_sandbox.store import VerificationStore

Key = Rung | int
"""A job of a ladder: a rung below full for the whole group, or the number of a different answer for full."""
_MOST_PRIORITY = 100.0


def job_request(spec: LadderSpec, key: Key, priority: float = 0.0) -> pb.CreateVerificationRequest:
    """The request of a job. Its id follows from ladder and key: asked again, it is the same job."""
    whole = isinstance(key, str)
    samples = range(len(spec.answers)) if whole else spec.samples_of(key)[:1]
    return pb.CreateVerificationRequest(
        request_id=_request_id(spec, key),
        verifier=spec.verifiers[key if whole else FULL],
        payload=spec.payload.encode(),
        answers=[spec.answers[sample] for sample in samples],
        sample_ids=[spec.sample_ids[sample] for sample in samples],
        deadline_seconds=spec.deadline_seconds,
        run=spec.run,
        group=spec.group,
        policy_version=spec.policy_version,
        priority=min(priority, _MOST_PRIORITY),
        traceparent=spec.traceparent,
    )


def _request_id(spec: LadderSpec, key: Key) -> str:
    return str(uuid5(NAMESPACE_OID, f"{spec.ladder_id}/{key}"))


def ladder_job_id(spec: LadderSpec, key: Key) -> str:
    """Id of a job, whether it exists or not: the store derives it from run and request id alone."""
    named = JobSpec(
        verifier=spec.verifiers[FULL],
        version="",
        fidelity=FULL,
        payload="",
        answers=(),
        deadline_seconds=0.0,
        run=spec.run,
        traceparent="",
        request_id=parse_uuid(_request_id(spec, key)),
    )
    return job_id_of(named)


class JobDoor:
    """Creates, reads, orders and cancels jobs of ladders."""

    def __init__(self, store: VerificationStore, dispatcher: Dispatcher, intake: Intake) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._intake = intake

    def parse(self, request: pb.CreateVerificationRequest) -> JobSpec:
        """Raises InvalidRequest or NotFound for what can never be graded."""
        return self._intake.parser().parse(request)

    def declared_cost_seconds(self, verifier: str) -> float:
        """CPU seconds per answer that a verifier declares; 1 when it declares none."""
        info = self._dispatcher.verifiers.get(verifier)
        return info.cost_seconds if info and info.cost_seconds > 0 else 1.0

    async def kinds(self, job: JobSpec) -> tuple[int, ...]:
        """Numbers of the different answers of a job; equal canonical answers have one."""
        filled = await self._intake.with_canonical(job)
        texts = filled.canonical or filled.answers
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        return tuple(numbers[text] for text in texts)

    async def create(self, spec: LadderSpec, wanted: Sequence[tuple[Key, float]]) -> list[Job]:
        """Stores jobs with their priorities; those that exist stay. Raises CapacityExhausted."""
        return await self._intake.create([self.parse(job_request(spec, key, priority)) for key, priority in wanted])

    async def get_many(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Jobs by id; None for one that was never created, or is kept no longer."""
        return await self._store.get_many(job_ids)

    async def prefer(self, job_id: str, priority: float) -> None:
        """Moves a job in its queue, if it waits there still."""
        try:
            await self._store.set_priority(job_id, min(priority, _MOST_PRIORITY))
        except NotFound:
            return

    async def cancel(self, job_id: str) -> None:
        """Cancels a job, and stops who works on it; one that ended, or is not kept, stays as it is."""
        try:
            if await self._store.cancel_job(job_id):
                self._dispatcher.abandon(job_id)
        except NotFound:
            return
