"""What is seen of a job's members, by their agents or by the lack of them, as the next state of the job. Pure, like
`jobs`."""

from collections.abc import Mapping
from dataclasses import replace

from reflux_scheduler import jobs, restarts
from reflux_scheduler.job import DONE, Heard, Job, MemberStatus, Report, Seat


def observe(job: Job, agents: Mapping[tuple[str, str], Heard], now: float) -> Job:
    """The job after what agents said, in one pass over its members. Lost members start anew within their bound.

    Args:
        job: the job before.
        agents: latest words by node and grant; members that an earlier incarnation ran are gone.
        now: Unix time in seconds.
    """
    if job.final or job.placement is None or not agents:
        return job
    changed: dict[str, MemberStatus] = {}
    for seat in job.placement.seats():
        heard = agents.get((seat.node, job.grant_id(seat.part)))
        if heard is None:
            continue
        before = job.status(seat)
        if before.node != seat.node or before.part != seat.part:
            continue  # It still has to leave its old place.
        report = heard.reports.get(job.role_id(seat))
        if report is not None and report.attempt not in (0, job.attempt):
            report = None
        after = _seen(job, before, heard.incarnation, report, now)
        if after is not before and after != before:
            changed[seat.label] = after
    return _changed(job, changed, now)


def observe_one(job: Job, seat: Seat, post: tuple[str, str], heard: Heard, now: float) -> Job:
    """The job after an agent's answer about one member; it says nothing of the others."""
    if job.final or job.placement is None or job.placement.seat(seat.role, seat.rank) != seat:
        return job
    before, report = job.status(seat), heard.reports.get(job.role_id(seat))
    if report is None or report.attempt not in (0, job.attempt) or job.grant_id(seat.part) != post[1]:
        return job
    after = _seen(job, before, heard.incarnation, report, now)
    return job if after == before else _changed(job, {seat.label: after}, now)


def node_lost(job: Job, node: str, grant: str, cause: str, now: float) -> Job:
    """The job after an agent is gone for good: its members are lost, what follows is for the policy to say."""
    if job.final or job.placement is None:
        return job
    changed: dict[str, MemberStatus] = {}
    for seat in job.placement.seats():
        status = job.status(seat)
        if seat.node == node and job.grant_id(seat.part) == grant and status.state not in DONE:
            changed[seat.label] = replace(status, state="lost", pid=0, rss_bytes=0, message=cause)
    left = tuple(seat for seat in job.retiring if (seat.node, job.grant_id(seat.part)) != (node, grant))
    if len(left) != len(job.retiring):
        job = replace(job, retiring=left)
    return _changed(job, changed, now)


def stopped_member(job: Job, seat: Seat, now: float) -> Job:
    """The job after an agent said that it has no such member (any more)."""
    status = job.status(seat)
    if job.final or status.state in DONE:
        return job
    return _changed(job, {seat.label: replace(status, state="stopped", pid=0, rss_bytes=0)}, now)


def _seen(job: Job, member: MemberStatus, incarnation: str, report: Report | None, now: float) -> MemberStatus:
    if member.state in ("succeeded", "failed", "stopped"):
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
    if member.state == "lost" and job.ending is not None:
        return member
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


def _changed(job: Job, changed: Mapping[str, MemberStatus], now: float) -> Job:
    if not changed:
        return job
    after = replace(job, members={**job.members, **changed})
    for label, new in changed.items():
        old = job.members.get(label) or MemberStatus(new.role, new.rank, new.node, new.part)
        kind, text = _news(old, new)
        if kind:
            after = jobs.note(after, kind, f"{new.label} {text}", now, new.label)
    return jobs.settled(after, now)


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
    if new.state == "lost":
        return "lost", f"was lost: {new.message}"
    if new.state == "restarting":
        return "exited", f"{new.message or restarts.ended(new.exit_code)}; it will start again"
    if new.state == "succeeded":
        return "exited", "ended with status 0"
    if new.state == "failed":
        return "failed", new.message or restarts.ended(new.exit_code)
    return "stopped", "stopped"
