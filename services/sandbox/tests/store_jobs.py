"""Small jobs and their ends, for the tests of the store."""

import dataclasses

from reflux_sandbox.jobs import Grade, JobEnd, JobSpec
from reflux_sandbox.store import StoreLimits

SCORED = (Grade(outcome="scored", reward=1.0, figures={"r": 0.5}, message="m"),)


def limits(**changes):
    values = {"most_queued": 4, "lease_seconds": 5.0, "most_attempts": 2, "keep_seconds": 60, "cache_seconds": 60}
    return StoreLimits(**(values | changes))


def spec(answer="a", **changes):
    fields = {
        "verifier": "test/length",
        "version": "1",
        "fidelity": "rule",
        "payload": "{}",
        "answers": (answer,),
        "deadline_seconds": 60.0,
        "run": "run",
        "traceparent": "",
    }
    return JobSpec(**(fields | changes))


async def create(store, job_spec, request_id=""):
    how, job = await store.create(dataclasses.replace(job_spec, request_id=request_id))
    return how, job.job_id


def scored(job, rewards=None):
    """The end of a claimed job with a reward for each answer that it runs."""
    values = rewards or [1.0] * len(job.answers)
    grades = tuple(Grade(outcome="scored", reward=value, figures={"r": 0.5}, message="m") for value in values)
    return JobEnd(job=job, grades=grades)


def late(job):
    return JobEnd(job=job, outcome="timeout", message="late", cpu_seconds=1.0)


def outcomes(job):
    return [grade.outcome for grade in job.grades]


async def claim_one(store):
    (job,) = (await store.claim("rule", "", 1)).jobs
    return job
