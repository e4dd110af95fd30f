"""What becomes of a gang when the cluster does not give it a part: a running one stays smaller where it may be, and
does not ask again for a while; any other goes back into the queue. Pure, like `jobs`."""

from dataclasses import replace

from reflux_scheduler import jobs
from reflux_scheduler.job import Job, Placement, RolePlaces

PAUSE_SECONDS = 300.0
"""For so long a gang does not grow after room for that was not to be had."""


def refused(job: Job, part: int, cause: str, now: float) -> Job:
    """The job after the cluster said that it will never give a part. One that has not started fails: it would be
    refused again."""
    if job.state == "PLACED":
        return jobs.end(job, "FAILED", cause, now)
    return given_up(job, part, cause, now)


def given_up(job: Job, part: int, cause: str, now: float) -> Job:
    """The job without the room of a part that is not given, or was taken away."""
    if job.final or job.ending is not None or job.placement is None:
        return job
    if all(part not in places.parts for places in job.placement.roles):
        return job
    smaller = without(job, part) if job.state in ("STARTING", "RUNNING") else None
    if smaller is None:
        return jobs.requeue(job, cause, now)
    text = f"stays smaller: {cause}"
    job = replace(jobs.moved(job, smaller, "resized", text, now), grow_after=now + PAUSE_SECONDS)
    return jobs.waiting(job, text)


def without(job: Job, part: int) -> Placement | None:
    """Its places but for the members of a part and those of higher ranks, in whole segments; None when some role needs
    them, or when a part would be left with some of its members: the cluster takes back nothing but whole parts."""
    assert job.placement is not None
    kept: list[RolePlaces] = []
    dropped: set[int] = set()
    for places in job.placement.roles:
        role = job.spec.role(places.role)
        count = places.parts.index(part) if part in places.parts else len(places.nodes)
        if count < len(places.nodes):
            count -= count % (role.segment_size or 1)
        if count < role.demand().least:
            return None
        kept.append(RolePlaces(places.role, places.nodes[:count], places.gpus[:count], places.parts[:count]))
        dropped.update(places.parts[count:])
    smaller = replace(job.placement, roles=tuple(kept))
    held = {number for places in kept for number in places.parts}
    return smaller if held and not held & dropped else None
