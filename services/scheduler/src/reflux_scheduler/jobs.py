"""The life of a job as a pure state machine: every function takes a job and returns the next one.

PENDING -> PLACED -> STARTING -> RUNNING -> SUCCEEDED | FAILED | CANCELLED. A job that has a place ends in two steps:
first `ending` says how and why, then its members are stopped and its grants given back; only when all are gone does it
take its final state and give its room back. An ending of "PENDING" leads back into the queue (preemption, lost nodes,
migration): the next attempt starts with nothing but its history.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from reflux_scheduler.job import (
    DONE,
    MAX_EVENTS,
    Ending,
    Event,
    FinalState,
    Job,
    MemberStatus,
    Part,
    Placement,
    Seat,
    State,
)


def placed(job: Job, placement: Placement, now: float, why: str = "") -> Job:
    """The job with its room; nothing was asked of the cluster yet."""
    where = f"{placement.num_members} members in {placement.level} {placement.domain}"
    members = {}
    for seat in placement.seats() if job.members else ():
        known = job.members.get(seat.label)
        if known is not None:
            members[seat.label] = replace(known, node=seat.node, part=seat.part)
    job = replace(
        job, placement=placement, members=members, next_placement=None, placed_at=now, attempt=job.attempt + 1
    )
    return _enter(job, "PLACED", f"{where}; {why}" if why else where, now)


def starting(job: Job, now: float) -> Job:
    """From here on agents may have been told to start members."""
    assert job.state == "PLACED"
    return _enter(replace(job, started_at=now), "STARTING", f"starting {job.num_members} members", now)


def waiting(job: Job, message: str) -> Job:
    """The job with what it waits for."""
    return job if job.final or job.message == message else replace(job, message=message, sequence=job.sequence + 1)


def end(job: Job, state: FinalState, cause: str, now: float) -> Job:
    """Ends a job for good; at once when it holds nothing, else through `ending`.

    The first cause stays, but an end beats a way back into the queue. Room that was promised to others meanwhile
    stays promised.
    """
    if job.final or (job.ending is not None and job.ending.state != "PENDING"):
        return job
    if job.placement is None:
        return _finish(job, state, cause, now)
    ending = Ending(state, cause, was_pending=job.ending is not None)
    job = replace(job, ending=ending, next_placement=None, message=f"stopping: {cause}")
    return settled(note(job, "state", f"stopping, then {state}: {cause}", now), now)


def requeue(job: Job, cause: str, now: float, *, preempted_by: str = "", then: Placement | None = None) -> Job:
    """Stops a job that has a place and sends it back into the queue, or, with `then`, to its next place.

    Args:
        job: a job with a place; one that is ending already stays as it is.
        cause: why, for people.
        now: Unix time in seconds.
        preempted_by: the job that gets its room, when that is the reason.
        then: where it goes at once.
    """
    if job.final or job.ending is not None or job.placement is None:
        return job
    counts = {"preemptions": job.preemptions + 1} if preempted_by else {"requeues": job.requeues + 1}
    kind = "preempted" if preempted_by else "migrated" if then is not None else "requeued"
    job = replace(
        job,
        ending=Ending("PENDING", cause),
        next_placement=then,
        message=f"stopping: {cause}",
        preempted_by=preempted_by or job.preempted_by,
        **counts,
    )
    return settled(note(job, kind, cause, now), now)


def moved(job: Job, placement: Placement, kind: str, why: str, now: float) -> Job:
    """The job with other places for some of its members; those that keep their place are left alone.

    Places that were left with a process that may still run become `retiring`; their successors start once it is gone.
    """
    assert job.placement is not None
    before = {seat.label: seat for seat in job.placement.seats()}
    after = {seat.label: seat for seat in placement.seats()}
    members, retiring = dict(job.members), list(job.retiring)
    for label, seat in before.items():
        if after.get(label) == seat:
            continue
        status = members.pop(label, None)
        if _may_run(job, seat, status):
            retiring.append(seat)
        if label in after:
            restarts_so_far = (status.restarts if status else 0) + 1
            new = after[label]
            members[label] = MemberStatus(
                new.role, new.rank, new.node, new.part, restarts=restarts_so_far, carried_restarts=restarts_so_far
            )
    stranded = _stranded(job, placement)
    job = replace(job, placement=placement, members=members, retiring=tuple(retiring), stranded=stranded)
    return settled(note(job, kind, why, now), now)


def _stranded(job: Job, placement: Placement) -> tuple[Seat, ...]:
    """Places that no member has any more, in parts that some member still has: the cluster keeps them for the job. Not
    those of members that were lost: with the node, or its agent, the cluster has lost the room too."""
    assert job.placement is not None
    if not job.parts:
        return ()
    used = Counter((seat.role, seat.part, seat.node, seat.gpus) for seat in placement.seats())
    parts = {part for _, part, _, _ in used}
    stranded: list[Seat] = []
    for seat in (*job.placement.seats(), *job.stranded):
        place = (seat.role, seat.part, seat.node, seat.gpus)
        if used[place]:
            used[place] -= 1
        elif seat.part in parts and (seat in job.stranded or job.status(seat).state != "lost"):
            stranded.append(seat)
    return tuple(stranded)


def _may_run(job: Job, seat: Seat, status: MemberStatus | None) -> bool:
    """Whether a process may be at a place; a start without an answer may have happened, outside of grants to come."""
    if job.state not in ("STARTING", "RUNNING") or (status is not None and status.state in DONE):
        return False
    return not job.parts or any(part.number == seat.part and part.state == "granted" for part in job.parts)


def retired(job: Job, seat: Seat) -> Job:
    """The job after the process at a place that was left is gone."""
    if seat not in job.retiring:
        return job
    return replace(job, retiring=tuple(each for each in job.retiring if each != seat))


def released(job: Job, part: int, now: float) -> Job:
    """The job after the cluster took a part back."""
    if all(each.number != part for each in job.parts):
        return job
    stranded = tuple(seat for seat in job.stranded if seat.part != part)
    parts = tuple(each for each in job.parts if each.number != part)
    return settled(replace(job, parts=parts, stranded=stranded), now)


def to_start(job: Job) -> tuple[Seat, ...]:
    """Members that an agent has to be told to start."""
    if job.ending is not None or job.placement is None or job.state not in ("STARTING", "RUNNING"):
        return ()
    leaving = {seat.label for seat in job.retiring}
    return tuple(
        seat for seat in job.placement.seats() if job.status(seat).state == "waiting" and seat.label not in leaving
    )


def to_stop(job: Job) -> tuple[Seat, ...]:
    """Members that an agent has to be told to stop; a start without an answer may have happened, so those count."""
    if job.ending is None or job.final or job.placement is None:
        return job.retiring if not job.final else ()
    if job.state == "PLACED":
        return ()
    seats = tuple(seat for seat in job.placement.seats() if job.status(seat).state not in DONE)
    return (*seats, *job.retiring)


def settled(job: Job, now: float) -> Job:
    """Draws the conclusions from the members' states."""
    if job.placement is None:
        return job
    if job.ending is not None:
        if to_stop(job) or job.parts:
            return job
        return (
            _requeued(job, now)
            if job.ending.state == "PENDING"
            else _finish(job, job.ending.state, job.ending.cause, now)
        )
    states = [(seat, job.status(seat)) for seat in job.placement.seats()]
    for _, status in states:
        if status.state == "failed":
            return end(job, "FAILED", f"{status.label} {status.message}", now)
    if job.state not in ("STARTING", "RUNNING"):
        return job
    serving = {role.name for role in job.spec.roles if role.serves}
    working = [status for seat, status in states if seat.role not in serving] or [status for _, status in states]
    if all(status.state == "succeeded" for status in working):
        return end(job, "SUCCEEDED", "all members ended with status 0", now)
    if job.state == "STARTING" and all(status.state not in ("waiting", "lost") for _, status in states):
        job = replace(job, running_at=now, slow_starts=0)
        return _enter(job, "RUNNING", f"all {len(states)} members run", now)
    return job


def note(job: Job, kind: str, text: str, now: float, member: str = "") -> Job:
    """The job with one more event."""
    event = Event(job.sequence + 1, now, kind, text, f"{job.id}/{member}" if member else "")
    return replace(job, sequence=event.sequence, events=(*job.events, event)[-MAX_EVENTS:])


def _requeued(job: Job, now: float) -> Job:
    """Back in the queue, or at the next place. Counts of restarts go on: no attempt passes for the first."""
    assert job.ending is not None
    members = {
        label: MemberStatus(
            status.role, status.rank, "", restarts=status.restarts + 1, carried_restarts=status.restarts + 1
        )
        for label, status in job.members.items()
    }
    then, cause = job.next_placement, job.ending.cause
    # Where room has to be asked for, the grant of the next place got its number when that was decided.
    numbers = {number for places in then.roles for number in places.parts} if then is not None else ()
    job = replace(
        job,
        parts=tuple(Part(number) for number in sorted(numbers) if number < job.next_part),
        placement=None,
        stranded=(),
        next_placement=None,
        ending=None,
        members=members,
        placed_at=0.0,
        started_at=0.0,
        running_at=0.0,
        queued_at=now,
    )
    job = _enter(job, "PENDING", f"queued again: {cause}", now)
    return job if then is None else placed(job, then, now, cause)


def _finish(job: Job, state: FinalState, cause: str, now: float) -> Job:
    return _enter(replace(job, ending=None, ended_at=now), state, cause, now)


def _enter(job: Job, state: State, message: str, now: float) -> Job:
    return note(replace(job, state=state, message=message), "state", f"{state}: {message}", now)


Transition = Callable[[Job], Job]
