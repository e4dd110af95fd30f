"""reflux verifications: the durable jobs that grade answers, for a person to look at, to cancel, or to do by hand."""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Column, Table

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_client import connection
from reflux_client.connection import ClientError

if TYPE_CHECKING:
    from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceAsyncStub

_CALL_SECONDS = 30.0
_STATES = ("queued", "running", "ended")
T = TypeVar("T")


@click.group()
def verifications() -> None:
    """Show, cancel, complete and retry the jobs that grade answers."""


def _ask(call: "Callable[[SandboxServiceAsyncStub], Awaitable[T]]") -> T:
    """One call of the sandbox."""

    async def asking() -> T:
        async with connection.channel("sandbox") as channel:
            return await asyncio.wait_for(call(SandboxServiceStub(channel)), _CALL_SECONDS)

    return asyncio.run(asking())


def _name(text: str) -> str:
    return text if text.startswith("verifications/") else f"verifications/{text}"


@verifications.command("list")
@click.argument("run")
@click.option("--state", type=click.Choice(_STATES), help="Only jobs in this state.")
@click.option("--group", default="", help="Only jobs of this group.")
@click.option("--most", default=50, show_default=True, help="How many to show.")
def list_jobs(run: str, state: str | None, group: str, most: int) -> None:
    """List the jobs of RUN: those that have not ended, oldest first, then the newest that ended."""
    wanted = Verification.State.Value(f"STATE_{state.upper()}") if state else Verification.STATE_UNSPECIFIED

    async def pages(stub: "SandboxServiceAsyncStub") -> list[Verification]:
        found: list[Verification] = []
        token = ""
        while len(found) < most:
            page = await stub.ListVerifications(
                pb.ListVerificationsRequest(run=run, state=wanted, group=group, page_size=500, page_token=token)
            )
            found += page.verifications
            token = page.next_page_token
            if not token:
                break
        return found[:most]

    Console().print(jobs_table(_ask(pages)))


def jobs_table(jobs: Iterable[Verification]) -> Table:
    """One line per job."""
    columns = ("state", "verifier", "group", "priority", "tries", "waited s", "ran s", "cpu s", "outcomes")
    table = Table(Column("verification", overflow="fold"), *columns)
    for job in jobs:
        table.add_row(
            job.name.removeprefix("verifications/"),
            Verification.State.Name(job.state).removeprefix("STATE_").lower() + (" (cached)" if job.cached else ""),
            job.verifier,
            job.group,
            f"{job.priority:g}",
            str(job.attempts),
            f"{job.queue_seconds:.2f}",
            f"{job.run_seconds:.2f}",
            f"{job.cpu_seconds:.2f}",
            _outcomes(job),
        )
    return table


def _outcomes(job: Verification) -> str:
    names = [Grade.Outcome.Name(grade.outcome).removeprefix("OUTCOME_").lower() for grade in job.grades]
    known = [name for name in names if name != "unspecified"]
    return ", ".join(f"{known.count(name)} {name}" for name in dict.fromkeys(known))


@verifications.command()
@click.argument("name")
def show(name: str) -> None:
    """Print one job as JSON."""
    answer = _ask(lambda stub: stub.GetVerification(pb.GetVerificationRequest(name=_name(name))))
    click.echo(MessageToJson(answer.verification, preserving_proto_field_name=True))


@verifications.command()
@click.argument("name", default="")
@click.option("--run", default="", help="Cancel the jobs of this run instead of one job.")
@click.option("--group", default="", help="With --run: only this group.")
@click.option("--older-than", default=0, help="With --run: only answers of older policy versions than this.")
def cancel(name: str, run: str, group: str, older_than: int) -> None:
    """Cancel the job NAME, or those of a run that have not ended; their answers have no reward."""
    if bool(name) == bool(run) or (not run and (group or older_than)):
        raise ClientError("name one job, or a run with --run (then --group and --older-than may narrow it)")
    if name:
        _ask(lambda stub: stub.CancelVerification(pb.CancelVerificationRequest(name=_name(name))))
        click.echo(f"{name} has ended")
        return
    request = pb.CancelVerificationsRequest(run=run, group=group, older_than_policy_version=older_than)
    click.echo(f"cancelled {_ask(lambda stub: stub.CancelVerifications(request)).cancelled} jobs")


@verifications.command()
@click.argument("run", default="")
def dead(run: str) -> None:
    """List jobs that nothing could grade, newest first, with the reason; RUN restricts them to one run."""
    letters = _ask(lambda stub: stub.ListDeadLetters(pb.ListDeadLettersRequest(run=run, page_size=500))).letters
    table = Table(Column("verification", overflow="fold"), "run", "verifier", "tries", "when", "reason")
    for letter in letters:
        job = letter.verification
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.end_time))
        name = job.name.removeprefix("verifications/")
        table.add_row(name, job.run, job.verifier, str(job.attempts), when, letter.reason)
    Console().print(table)


@verifications.command()
@click.argument("name")
@click.option("--deadline", default=0.0, help="Seconds; 0 takes the verifier's default.")
def retry(name: str, deadline: float) -> None:
    """Create a job with the content of the dead letter NAME; the old one stays as it ended."""
    request = pb.RetryDeadLetterRequest(request_id=str(uuid.uuid4()), name=_name(name), deadline_seconds=deadline)
    click.echo(_ask(lambda stub: stub.RetryDeadLetter(request)).verification.name)


@verifications.command()
@click.argument("run")
def report(run: str) -> None:
    """Say what became of the answers of RUN, and whether its timeouts go with their length."""
    found = _ask(lambda stub: stub.GetVerificationReport(pb.GetVerificationReportRequest(run=run)))
    click.echo(report_text(found))


def report_text(found: pb.GetVerificationReportResponse) -> str:
    """A few lines for people."""
    counts = {Grade.Outcome.Name(each.outcome).removeprefix("OUTCOME_").lower(): each.count for each in found.outcomes}
    total = found.executed_answers + found.reused_answers
    share = f"{found.reused_answers / total:.0%}" if total else "-"
    verdict = "SUSPICIOUS: timeouts go with long answers" if found.timeouts_follow_length else "nothing conspicuous"
    return "\n".join(
        [
            "answers    " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count),
            f"executed   {found.executed_answers}, reused {found.reused_answers} ({share})",
            f"processor  {found.cpu_seconds:.1f} s",
            f"timeouts   r = {found.timeout_length_correlation:+.2f} with the length of {found.timeout_length_answers} "
            f"answers, p = {found.timeout_length_p_value:.2g}: {verdict}",
        ]
    )


@verifications.command()
@click.argument("verifier")
@click.option("--most", default=1, show_default=True, help="How many jobs to take.")
@click.option("--lease", default=3600.0, show_default=True, help="Seconds until others may take them.")
def claim(verifier: str, most: int, lease: float) -> None:
    """Take jobs of an external VERIFIER ("external/NAME"): a JSON document per line, with the token to complete it."""
    request = pb.ClaimVerificationsRequest(verifier=verifier, max_jobs=most, lease_seconds=lease)
    for each in _ask(lambda stub: stub.ClaimVerifications(request)).claims:
        document = {
            "name": each.verification.name,
            "token": each.token,
            "payload": json.loads(each.payload),
            "answers": list(each.answers),
        }
        click.echo(json.dumps(document))


@verifications.command()
@click.argument("name")
@click.argument("rewards", nargs=-1, required=True)
@click.option("--token", required=True, help="From `claim`, or from the creation of the job.")
@click.option("--message", default="", help="One line for people.")
def complete(name: str, rewards: tuple[str, ...], token: str, message: str) -> None:
    """Give the verdict on a claimed job: a number per answer, or the word "invalid"."""
    grades = [_verdict(text, message) for text in rewards]
    request = pb.CompleteVerificationRequest(name=_name(name), token=token, grades=grades)
    job = _ask(lambda stub: stub.CompleteVerification(request)).verification
    click.echo(f"{job.name} {Verification.State.Name(job.state).removeprefix('STATE_').lower()}: {_outcomes(job)}")


def _verdict(text: str, message: str) -> Grade:
    if text == "invalid":
        return Grade(outcome=Grade.OUTCOME_INVALID, message=message)
    try:
        return Grade(outcome=Grade.OUTCOME_SCORED, reward=float(text), message=message)
    except ValueError:
        raise ClientError(f"a verdict is a number or the word invalid, got {text!r}") from None
