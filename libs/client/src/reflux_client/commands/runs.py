"""reflux run, runs, watch, pause, resume, cancel: training runs."""

import asyncio
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection
from reflux_client.progress import RunView
from reflux_client.runfile import counts_of, load_run_file

_ENDED = (Run.STATE_SUCCEEDED, Run.STATE_FAILED, Run.STATE_CANCELLED)
_RECONNECT_SECONDS = 120.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=None, help="seed instead of the file's")
@click.option("--resume", "resume_run", default="", metavar="RUN", help="continue RUN from its newest checkpoint")
@click.option("--detach", is_flag=True, help="return as soon as the run is accepted")
@click.option("--check", is_flag=True, help="only say what the file amounts to, memory included; start nothing")
def run(file: Path, seed: int | None, resume_run: str, detach: bool, check: bool) -> None:
    """Start the run that FILE describes and watch it. Ctrl-C stops watching; `reflux cancel RUN` stops the run."""
    if check:
        click.echo("\n".join(counts_of(file, seed).lines()))
        return
    config = load_run_file(file, seed)
    created = asyncio.run(create(config, resume_run))
    click.echo(f"run {created.name.removeprefix('runs/')}  folder {created.folder}")
    if detach:
        click.echo(f"`reflux watch {created.name.removeprefix('runs/')}` follows it")
    else:
        succeeded = follow(created.name)
        if (Path(created.folder) / "summary.json").exists():  # the trainer may run on another host
            click.echo(f"report {report_of(Path(created.folder))}")
        sys.exit(0 if succeeded else 1)


def report_of(folder: Path) -> Path:
    """Writes the report of a run folder and returns its path."""
    from reflux_client.report.build import write_report  # charts load slowly: only where they are drawn

    return write_report(folder)


async def create(config: Any, resume_run: str = "") -> Run:
    """Creates a run from a RunConfig message."""
    request = pb.CreateRunRequest(
        request_id=str(uuid.uuid4()), config=config, resume_run=resume_run.removeprefix("runs/")
    )
    async with connection.channel("trainer") as channel:
        return (await TrainerServiceStub(channel).CreateRun(request)).run


@click.command()
@click.argument("name", metavar="RUN")
def watch(name: str) -> None:
    """Follow RUN with live progress until it ends; exit status 1 when it fails."""
    sys.exit(0 if follow(resource_of(name)) else 1)


def follow(name: str, interrupted: str = "") -> bool:
    """Shows a run until it ends; True when it succeeded. Ctrl-C ends the view and prints `interrupted`."""
    run_id = name.removeprefix("runs/")
    try:
        ended, view = _watch_to_the_end(name)
    except KeyboardInterrupt:
        goes_on = f"run {run_id} goes on: `reflux watch {run_id}` follows it, `reflux cancel {run_id}` ends it"
        click.echo(interrupted or goes_on, err=True)
        raise
    succeeded = ended.state == Run.STATE_SUCCEEDED
    reason = f": {ended.message}" if ended.message else ""
    click.echo(f"run {name.removeprefix('runs/')} {view.state} after {ended.step} steps{reason}", err=not succeeded)
    return succeeded


def _watch_to_the_end(name: str) -> tuple[Run, RunView]:
    console = Console()
    view = RunView(name.removeprefix("runs/"))
    if not console.is_terminal:
        return asyncio.run(_follow(name, view, _Printer(view).tick)), view
    with Live(view, console=console, refresh_per_second=4):
        return asyncio.run(_follow(name, view, lambda: None)), view


class _Printer:
    """Prints a line every few seconds where there is no terminal."""

    def __init__(self, view: RunView, every_seconds: float = 5.0) -> None:
        self._view = view
        self._every = every_seconds
        self._last = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            click.echo(self._view.plain_line())


async def _follow(name: str, view: RunView, tick: Callable[[], None]) -> Run:
    """Reads the stream to its end; a trainer that restarts is waited for."""
    token, broken_since = "", None
    async with connection.channel("trainer") as channel:
        stub = TrainerServiceStub(channel)
        while True:
            try:
                async for event in stub.WatchRun(pb.WatchRunRequest(name=name, resume_token=token)):
                    token, broken_since = event.resume_token, None
                    view.update(event.run, event.progress if event.HasField("progress") else None)
                    tick()
                    if event.run.state in _ENDED:
                        return event.run
                found = (await stub.GetRun(pb.GetRunRequest(name=name))).run
                if found.state in _ENDED:
                    return found
            except grpc.aio.AioRpcError as error:
                broken_since = broken_since or time.monotonic()
                gone = time.monotonic() - broken_since > _RECONNECT_SECONDS
                if error.code() is not grpc.StatusCode.UNAVAILABLE or gone:
                    raise
            await asyncio.sleep(0.5)


@click.command()
def runs() -> None:
    """List runs, newest first."""
    table = Table(Column("run", no_wrap=True), "state", "step", "attempt", "started", "message")
    for each in asyncio.run(_list()):
        state = Run.State.Name(each.state).removeprefix("STATE_").lower().replace("_", " ")
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.created_at))
        table.add_row(each.name.removeprefix("runs/"), state, str(each.step), str(each.attempt), started, each.message)
    Console().print(table)


async def _list() -> list[Run]:
    found: list[Run] = []
    token = ""
    async with connection.channel("trainer") as channel:
        while True:
            page = await TrainerServiceStub(channel).ListRuns(pb.ListRunsRequest(page_token=token))
            found.extend(page.runs)
            token = page.next_page_token
            if not token:
                return found


@click.command()
@click.argument("name", metavar="RUN")
def pause(name: str) -> None:
    """Hold RUN: nothing is issued or trained until `reflux resume`."""
    _act(name, lambda stub, run_name: stub.PauseRun(pb.PauseRunRequest(name=run_name)))


@click.command()
@click.argument("name", metavar="RUN")
def resume(name: str) -> None:
    """Continue RUN: a paused one where it is, a failed or cancelled one from its newest checkpoint."""
    _act(name, lambda stub, run_name: stub.ResumeRun(pb.ResumeRunRequest(name=run_name)))


@click.command()
@click.argument("name", metavar="RUN")
def cancel(name: str) -> None:
    """End RUN and its processes."""
    _act(name, lambda stub, run_name: stub.CancelRun(pb.CancelRunRequest(name=run_name)))


def _act(name: str, call: Callable[[Any, str], Awaitable[Any]]) -> None:
    async def act() -> Run:
        async with connection.channel("trainer") as channel:
            return (await call(TrainerServiceStub(channel), resource_of(name))).run

    after = asyncio.run(act())
    click.echo(f"{name}: {Run.State.Name(after.state).removeprefix('STATE_').lower().replace('_', ' ')}")


def resource_of(name: str) -> str:
    """The resource name of a run that may be given by its id alone."""
    return name if name.startswith("runs/") else f"runs/{name}"
