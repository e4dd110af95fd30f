"""reflux jobs: what the scheduler runs, where, and why something waits."""

import time

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Column, Table

from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux_client.commands.cluster import ask

_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


@click.group()
def jobs() -> None:
    """Look at the scheduler's jobs, and end them."""


@jobs.command("list")
@click.option("--all", "everything", is_flag=True, help="Ended jobs too.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def list_jobs(everything: bool, as_json: bool) -> None:
    """List jobs, newest first."""
    answer = ask(lambda stub: stub.ListJobs(pb.ListJobsRequest(page_size=500, brief=True)))
    shown = [job for job in answer.jobs if everything or _state(job) not in _ENDED]
    if as_json:
        click.echo(MessageToJson(pb.ListJobsResponse(jobs=shown), preserving_proto_field_name=True))
        return
    table = Table(
        "job", "name", "state", "queue", "priority", "members", "GPUs", Column("where", overflow="fold"), "age",
        Column("message", overflow="fold"),
    )  # fmt: skip
    for job in shown:
        gpus = sum(role.count * role.resources.gpus for role in job.roles)
        members = sum(role.count for role in job.roles)
        table.add_row(
            job.name, job.display_name, _state(job), job.queue, str(job.priority), str(members), f"{gpus:g}",
            job.domain, _ago(job.created_at), job.message,
        )  # fmt: skip
    Console().print(table)


@jobs.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print the whole job.")
def show(job: str, as_json: bool) -> None:
    """Show one JOB: members, grants and its latest changes."""
    found = ask(lambda stub: stub.GetJob(pb.GetJobRequest(name=_name(job)))).job
    if as_json:
        click.echo(MessageToJson(found, preserving_proto_field_name=True))
        return
    click.echo(f"{found.name} {found.display_name}: {_state(found)}, {found.message}")
    click.echo(
        f"queue {found.queue}, priority {found.priority}, attempt {found.attempt}, "
        f"preempted {found.preemptions} times, queued again {found.requeues} times"
    )
    for grant in found.grants:
        told = f": {grant.reason}" if grant.reason else ""
        click.echo(f"grant {grant.id} is {grant.state} ({grant.native or 'no name'}, {len(grant.nodes)} nodes){told}")
    table = Table("member", "node", "GPUs", "state", "pid", "restarts", Column("message", overflow="fold"))
    members = {member.role_id.partition("/")[2]: member for member in found.members}
    for place in found.placements:
        label = f"{place.role}/{place.rank}"
        member = members.get(label, job_pb2.RoleStatus())
        state = job_pb2.RoleStatus.State.Name(member.state).removeprefix("STATE_").lower() if member.state else "waits"
        table.add_row(
            label, place.node, ",".join(map(str, place.gpu_indices)), state, str(member.pid or ""),
            str(member.restarts), member.message,
        )  # fmt: skip
    Console().print(table)
    for event in found.events[-10:]:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}")


@jobs.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def explain(job: str, as_json: bool) -> None:
    """Say why JOB waits, failed, or went where it is."""
    answer = ask(lambda stub: stub.ExplainJob(pb.ExplainJobRequest(name=_name(job))))
    if as_json:
        click.echo(MessageToJson(answer, preserving_proto_field_name=True))
        return
    click.echo(answer.sentence)
    if answer.cause:
        click.echo(f"cause: {answer.cause}")
    if answer.HasField("cost"):
        click.echo(f"cost of its place: {answer.cost.total:.4g} s per step ({answer.cost.traffic:.4g} of it traffic)")
    if answer.preempted_by:
        click.echo(f"stopped before for {answer.preempted_by}")


@jobs.command()
@click.argument("job")
def cancel(job: str) -> None:
    """Stop JOB and free its room; one that has ended stays as it is."""
    found = ask(lambda stub: stub.CancelJob(pb.CancelJobRequest(name=_name(job)))).job
    click.echo(f"{found.name} is {_state(found)}: {found.message}")


def _name(job: str) -> str:
    return job if job.startswith("jobs/") else f"jobs/{job}"


def _state(job: job_pb2.Job) -> str:
    return job_pb2.Job.State.Name(job.state).removeprefix("STATE_")


def _ago(then: float) -> str:
    seconds = max(0, int(time.time() - then))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
