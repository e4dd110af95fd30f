"""The life of a job as a pure state machine: every function takes a job and returns the next one.

PENDING -> PLACED -> STARTING -> RUNNING -> SUCCEEDED | FAILED | CANCELLED. A job that has started ends in two steps:
first `ending` says how and why, then its members are stopped; only when all are gone does it take its final state and
give its resources back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from reflux_scheduler import restarts
from reflux_scheduler.gang import Placement
from reflux_scheduler.job import DONE, MAX_EVENTS, Ending, Event, FinalState, Job, MemberStatus, Report, State


def placed(job: Job, placement: Placement, now: float) -> Job:
    """The job with its resources."""
    members = tuple(MemberStatus(member.role, member.rank, member.node) for member in placement.members)
    where = f"{len(members)} members in {placement.level} {'/'.join(placement.domain)}"
    return _enter(replace(job, placement=placement, members=members, placed_at=now), "PLACED", where, now)


def starting(job: Job, now: float) -> Job:
    """From here on agents may have been told to start members."""
    assert job.state == "PLACED"
    return _enter(job, "STARTING", f"starting {len(job.members)} members", now)


def waiting(job: Job, message: str) -> Job:
    """The job with what it waits for."""
    return job if job.final or job.message == message else replace(job, message=message, sequence=job.sequence + 1)


def end(job: Job, state: FinalState, cause: str, now: float) -> Job:
    """Ends a job; at once when nothing was started, else through `ending`. The first cause stays."""
    if job.final or job.ending is not None:
        return job
    if job.state in ("PENDING", "PLACED"):
        return _finish(job, state, cause, now)
    job = replace(job, ending=Ending(state, cause), message=f"stopping: {cause}")
    return _settled(_note(job, "state", f"stopping, then {state}: {cause}", now), now)


def observe(job: Job, node: str, incarnation: str, reports: Mapping[str, Report], now: float) -> Job:
    """The job after what the agent of `node` said. Lost members become waiting again while their bound allows it.

    Args:
        job: the job before.
        node: name of the node.
        incarnation: the agent process; members that an earlier one ran are gone.
        reports: by role id, all members of the agent.
        now: Unix time in seconds.
    """
    if job.final:
        return job

    def seen(member: MemberStatus) -> MemberStatus:
        report = reports.get(job.role_id(member))
        return _seen(job, member, incarnation, report, now) if member.node == node else member

    return _changed(job, seen, now)


def node_lost(job: Job, node: str, cause: str, now: float) -> Job:
    """The job after a node is gone for good: its members count as stopped, and the gang ends."""
    if job.final or all(member.node != node for member in job.members):
        return job

    def gone(member: MemberStatus) -> MemberStatus:
        if member.node != node or member.state in DONE:
            return member
        return replace(member, state="stopped", pid=0, rss_bytes=0, message=cause)

    return _changed(end(job, "FAILED", cause, now), gone, now)


def stopped_member(job: Job, role_id: str, now: float) -> Job:
    """The job after an agent said that it has no such member."""

    def gone(member: MemberStatus) -> MemberStatus:
        if job.role_id(member) != role_id or member.state in DONE:
            return member
        return replace(member, state="stopped", pid=0, rss_bytes=0)

    return _changed(job, gone, now)


def to_start(job: Job) -> tuple[MemberStatus, ...]:
    """Members that an agent has to be told to start."""
    if job.ending is not None or job.state not in ("STARTING", "RUNNING"):
        return ()
    return tuple(member for member in job.members if member.state == "waiting")


def to_stop(job: Job) -> tuple[MemberStatus, ...]:
    """Members that an agent has to be told to stop; a start without an answer may have happened, so those count."""
    if job.ending is None or job.final:
        return ()
    return tuple(member for member in job.members if member.state not in DONE)


def _seen(job: Job, member: MemberStatus, incarnation: str, report: Report | None, now: float) -> MemberStatus:
    if member.state in DONE:
        return member
    same = member.incarnation == incarnation
    if report is None:
        # The same agent forgets nothing: its report is from before the start.
        if same or member.state == "waiting":
            return member
        return _lost(job, member, "its agent was replaced", now)
    if same and report.revision < member.revision:
        return member
    if report.state == "stopped" and job.ending is None:
        if same and report.revision == member.revision:
            return member
        return _lost(job, replace(member, incarnation=incarnation, revision=report.revision), report.message, now)
    carried = member.carried_restarts if same or member.state == "waiting" else member.restarts
    return replace(
        member,
        state=report.state,
        incarnation=incarnation,
        revision=report.revision,
        pid=report.pid,
        restarts=carried + report.restarts,
        exit_code=report.exit_code,
        rss_bytes=report.rss_bytes,
        log_path=report.log_path,
        message=report.message,
        started_at=report.started_at,
        carried_restarts=carried,
    )


def _lost(job: Job, member: MemberStatus, cause: str, now: float) -> MemberStatus:
    member = replace(member, pid=0, rss_bytes=0, message=f"lost: {cause}")
    if job.ending is not None:
        return replace(member, state="stopped")
    losses = restarts.recent(member.losses, now)
    if len(losses) >= job.spec.role(member.role).max_restarts:
        bound = f"after {len(losses)} losses" if losses else "and no restart is allowed"
        return replace(member, state="failed", message=f"was lost ({cause}) {bound}")
    count = member.restarts + 1
    return replace(member, state="waiting", losses=(*losses, now), restarts=count, carried_restarts=count)


def _changed(job: Job, change: Callable[[MemberStatus], MemberStatus], now: float) -> Job:
    members = tuple(change(member) for member in job.members)
    if members == job.members:
        return job
    after = replace(job, members=members)
    for old, new in zip(job.members, members, strict=True):
        kind, text = _news(old, new)
        if kind:
            after = _note(after, kind, f"{new.label} {text}", now, new.label)
    return _settled(after, now)


def _news(old: MemberStatus, new: MemberStatus) -> tuple[str, str]:
    """What a watcher wants to hear about one member's change; empty when only figures moved."""
    if new.state == "waiting" and old.state != "waiting":
        return "lost", f"was {new.message}; it starts anew ({new.restarts} restarts)"
    if new.state == "running" and new.pid != old.pid:
        if new.restarts > old.restarts or old.state == "restarting":
            return "restarted", f"restarted with pid {new.pid} on {new.node} ({new.restarts} restarts)"
        return "started", f"started with pid {new.pid} on {new.node}"
    if new.state == old.state:
        return "", ""
    if new.state == "restarting":
        return "exited", f"{new.message or restarts.ended(new.exit_code)}; it will start again"
    if new.state == "succeeded":
        return "exited", "ended with status 0"
    if new.state == "failed":
        return "failed", new.message or restarts.ended(new.exit_code)
    return "stopped", "stopped"


def _settled(job: Job, now: float) -> Job:
    """Draws the conclusions from the members' states."""
    if job.ending is not None:
        done = all(member.state in DONE for member in job.members)
        return _finish(job, job.ending.state, job.ending.cause, now) if done else job
    failed = [member for member in job.members if member.state == "failed"]
    if failed:
        return end(job, "FAILED", f"{failed[0].label} {failed[0].message}", now)
    serving = {role.name for role in job.spec.roles if role.serves}
    working = [member for member in job.members if member.role not in serving] or list(job.members)
    if all(member.state == "succeeded" for member in working):
        return end(job, "SUCCEEDED", "all members ended with status 0", now)
    if job.state == "STARTING" and all(member.state != "waiting" for member in job.members):
        return _enter(job, "RUNNING", f"all {len(job.members)} members run", now)
    return job


def _finish(job: Job, state: FinalState, cause: str, now: float) -> Job:
    return _enter(replace(job, ending=None, ended_at=now), state, cause, now)


def _enter(job: Job, state: State, message: str, now: float) -> Job:
    return _note(replace(job, state=state, message=message), "state", f"{state}: {message}", now)


def _note(job: Job, kind: str, text: str, now: float, member: str = "") -> Job:
    event = Event(job.sequence + 1, now, kind, text, f"{job.id}/{member}" if member else "")
    return replace(job, sequence=event.sequence, events=(*job.events, event)[-MAX_EVENTS:])
