"""Why a job waits, failed, or went where it is: one sentence, and the same as data."""

from dataclasses import dataclass

from reflux_placement.place.cost import Cost, cost
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place
from reflux_scheduler.controller import Controller
from reflux_scheduler.job import Job


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about where a job is, or why it is nowhere."""

    sentence: str
    cause: str = ""
    misfit: Misfit | None = None
    domain: str = ""
    cost: Cost | None = None
    preempted_by: str = ""


async def explain(controller: Controller, job: Job) -> Explanation:
    """An explanation as of the last cycle."""
    if job.state == "PENDING":
        return _waiting(controller, job)
    misfit = await controller.shapes.of_failed(job)
    cause = {"PLACED": "grant" if job.parts else "start", "STARTING": "start"}.get(job.state, "")
    domain = job.placement.domain if job.placement is not None and not job.final else ""
    return Explanation(
        sentence=f"{job.name} is {job.state}: {job.message}",
        cause=cause,
        misfit=misfit,
        domain=domain,
        cost=_cost(controller, job),
        preempted_by=job.preempted_by,
    )


def _waiting(controller: Controller, job: Job) -> Explanation:
    room = controller.planner.room()
    wait = controller.planner.waits.get(job.name)
    found = find_place(room, job.spec.demand(), holders=True)
    misfit = found if isinstance(found, Misfit) else None
    cause = wait.cause if wait is not None else "behind"
    again = f"; it was stopped for {job.preempted_by} before" if job.preempted_by else ""
    told = job.message if job.message.startswith("waits") else f"waits: {job.message}"
    if misfit is not None and misfit.holders:
        told = f"waits: {misfit.sentence}{controller.nodes.absent()}"
    return Explanation(f"{job.name} {told}{again}", cause=cause, misfit=misfit, preempted_by=job.preempted_by)


def _cost(controller: Controller, job: Job) -> Cost | None:
    """What its place costs, in the room as it would be without it."""
    holding = controller.ledger.room.holdings.get(job.name)
    if holding is None:
        return None
    room = controller.ledger.room.copy()
    room.release(job.name)
    return cost(room, job.spec.demand(), holding.assignment)
