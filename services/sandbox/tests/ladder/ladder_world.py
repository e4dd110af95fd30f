"""Ladders on the real job store in a real Valkey; the tests grade the jobs themselves."""

import asyncio
import contextlib
import json
import uuid
from types import SimpleNamespace

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux_sandbox.intake import Intake
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.jobs import Grade, JobEnd
from reflux_sandbox.keys import AnswerKeys
from reflux_sandbox.ladder.door import JobDoor
from reflux_sandbox.ladder.ladders import Ladders
from reflux_sandbox.ladder.messages import parse_ladder
from reflux_sandbox.ladder.store import LadderStore
from reflux_sandbox.leases import stop_tasks
from reflux_sandbox.reader import JobReader
from reflux_sandbox.store import StoreLimits, VerificationStore

LIMITS = StoreLimits(most_queued=10_000, lease_seconds=30.0, most_attempts=3, keep_seconds=600, cache_seconds=600)
VERIFIERS = {
    f"test/{rung}": VerifierInfo(f"test/{rung}", "1", rung, trusted=True, cost_seconds=2.0)
    for rung in ("rule", "surrogate", "full")
}


class World:
    """One sandbox without children. `grader` maps (fidelity, answer) to a reward or an outcome."""

    def __init__(self, client, prefix, grader):
        self.store = VerificationStore(client, "box", LIMITS, prefix)
        self.ladders_store = LadderStore(client, client, 600, prefix)
        self._reader = JobReader(client, client, prefix)
        dispatcher = SimpleNamespace(
            verifiers=VERIFIERS, queue_of=lambda info: info.fidelity, wake=self._wake, abandon=lambda job_id: None
        )
        self.door = JobDoor(self.store, dispatcher, Intake(self.store, dispatcher, AnswerKeys(None, 1 << 20)))
        self.grader = grader
        self.graded = []
        """(fidelity, answer) in the order in which they ran."""
        self.paused = set()
        """Fidelities that nobody grades now."""
        self._work = asyncio.Event()

    def _wake(self, queue, verifier):
        self._work.set()

    @contextlib.asynccontextmanager
    async def ladders(self):
        """A sandbox service until the block ends; another one may follow it."""
        async with Ladders(self.ladders_store, self.door, self._reader) as ladders:
            yield ladders

    @contextlib.asynccontextmanager
    async def graders(self):
        """Grades jobs as they come until the block ends."""
        task = asyncio.create_task(self._grade())
        try:
            yield
        finally:
            await stop_tasks({task})

    async def _grade(self):
        while True:
            busy = False
            for fidelity in VERIFIERS:
                queue = fidelity.partition("/")[2]
                if queue in self.paused:
                    continue
                for job in (await self.store.claim(queue, "", 1)).jobs:
                    busy = True
                    await self.store.finish(self._end(queue, job))
            if not busy:
                self._work.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), 0.05)

    def _end(self, fidelity, job):
        found = [self.grader(fidelity, answer) for answer in job.answers]
        self.graded += [(fidelity, answer) for answer in job.answers]
        if isinstance(found[0], str):
            return JobEnd(job=job, outcome=found[0], message="no verdict")
        grades = tuple(Grade(outcome="scored", reward=reward) for reward in found)
        return JobEnd(job=job, grades=grades, cpu_seconds=1.5)

    async def events(self, run):
        """All events of a run so far."""
        rows = await self.ladders_store.events(run, "0-0", 1)
        events = [pb.WatchLaddersResponse.FromString(raw) for _, raw in rows]
        while len(rows) == 256:
            rows = await self.ladders_store.events(run, rows[-1][0], 1)
            events += [pb.WatchLaddersResponse.FromString(raw) for _, raw in rows]
        return events

    async def until(self, run, kind, count=1):
        """The events of a run when `count` of a kind are among them."""
        async with asyncio.timeout(60):
            while True:
                events = await self.events(run)
                if sum(event.WhichOneof("event") == kind for event in events) >= count:
                    return events
                await asyncio.sleep(0.01)


def request(run, group="7", answers=("a", "bb", "bb"), **policy):
    return pb.CreateLadderRequest(
        request_id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{run}/{group}")),
        run=run,
        group=group,
        payload=json.dumps({"of": run, "group": group}).encode(),
        answers=answers,
        sample_ids=[f"{group}/{number}" for number in range(len(answers))],
        policy_version=policy.pop("policy_version", 3),
        rule_verifier=policy.pop("rule_verifier", "test/rule"),
        surrogate_verifier="test/surrogate",
        full_verifier="test/full",
        policy=pb.LadderPolicy(**policy),
    )


async def parsed(world, *args, **kwargs):
    return await parse_ladder(request(*args, **kwargs), world.door)


def kinds(events):
    return [event.WhichOneof("event") for event in events]
