"""reflux demo, demo-seeds: the main job from nothing to a report, and nothing left running."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection, seeds_table, stack
from reflux_client.commands.runs import create, follow, report_of
from reflux_client.runfile import load_run_file

EXAMPLE = Path("examples/xrd-phase-id/run.toml")
STATE = Path(".reflux/demo")
GOES_ON = "the stack ends; the same command goes on with the run"
_SEEDS = (0, 1, 2)


@contextmanager
def _own_stack(state: Path = STATE, *, go_on: bool = False) -> Iterator[None]:
    """A stack in a folder of its own that ends with this block, and with this process if that is killed.

    The folder stays until the next demo: logs, traces and checkpoints can be looked at afterwards. With `go_on` the
    next one finds what was there.
    """
    folder = state.resolve()
    if connection.read_record(folder) is not None:
        raise connection.ClientError(f"another demo runs in {folder}")
    for old in [] if go_on else folder.glob("*"):
        if old.name != "cache":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    before = dict(os.environ)
    os.environ |= {"REFLUX_STATE_DIR": str(folder), "REFLUX_STACK_PID": str(os.getpid())}
    try:
        stack.start(folder, die_with_parent=True)
        yield
    finally:
        stack.stop(folder)
        os.environ.clear()
        os.environ.update(before)


def _train(file: Path, seed: int | None, overrides: dict[str, Any] | None = None) -> Path:
    """Runs `file` to its end on the present stack; returns the run folder. Raises `ClientError` when it fails."""
    return _followed(asyncio.run(create(load_run_file(file, seed, overrides))))


def _followed(created: Run, interrupted: str = "the demo ends with its stack") -> Path:
    """Follows a run to its end; returns its folder. Raises `ClientError` when it fails."""
    click.echo(f"run {created.name.removeprefix('runs/')}  folder {created.folder}")
    if not follow(created.name, interrupted):
        raise connection.ClientError(f"the run failed; folder {created.folder}, logs {connection.state_dir() / 'logs'}")
    return Path(created.folder)


@click.command()
@click.option("--file", type=click.Path(path_type=Path), default=EXAMPLE, show_default=True, help="run file")
@click.option("--seed", type=int, default=None, help="seed instead of the file's")
@click.option("--state", type=click.Path(path_type=Path), default=STATE, show_default=True, help="the stack's folder")
@click.option(
    "--go-on", is_flag=True, help="keep what is in that folder, and go on with its last run where it is not done"
)
def demo(file: Path, seed: int | None, state: Path, go_on: bool) -> None:
    """Stack up, train on X-ray phase identification, report, stack down."""
    load_run_file(file, seed)  # refuse a bad file before anything starts
    with _own_stack(state, go_on=go_on):
        found = asyncio.run(_unfinished()) if go_on else None
        created = found or asyncio.run(create(load_run_file(file, seed)))
        folder = _followed(created, GOES_ON) if go_on else _followed(created)
    summary = json.loads((folder / "summary.json").read_text())
    click.echo(f"held-out reward {summary['reward_after_warmup']:.3f} -> {summary['reward_final']:.3f}")
    click.echo(f"report {report_of(folder)}")
    click.echo(f"a sample's path: REFLUX_STATE_DIR={state} reflux trace {folder.name}/0")


async def _unfinished() -> Run | None:
    async with connection.channel("trainer") as channel:
        return await unfinished(TrainerServiceStub(channel))


async def unfinished(trainer: Any) -> Run | None:
    """The newest run, resumed if it has stopped before its end; None when there is none, or it is done."""
    newest = next(iter((await trainer.ListRuns(pb.ListRunsRequest(page_size=1))).runs), None)
    if newest is None or newest.state == Run.STATE_SUCCEEDED:
        return None
    if newest.state in (Run.STATE_FAILED, Run.STATE_CANCELLED, Run.STATE_PAUSED):
        return (await trainer.ResumeRun(pb.ResumeRunRequest(name=newest.name))).run
    return newest


@click.command(name="demo-seeds")
@click.option("--file", type=click.Path(path_type=Path), default=EXAMPLE, show_default=True, help="run file")
@click.option("--write-readme", is_flag=True, help="replace the table in README.md")
def demo_seeds(file: Path, write_readme: bool) -> None:
    """The main job with three seeds, and the control that hides the peaks."""
    rows: list[tuple[str, dict[str, Any]]] = []
    jobs = [(f"seed {seed}", seed, {}) for seed in _SEEDS]
    jobs.append(("control: peaks hidden, seed 0", 0, {"task": {"peaks_hidden": True}}))
    for label, seed, overrides in jobs:
        with _own_stack():
            folder = _train(file, seed, overrides)
        report_of(folder)
        rows.append((label, json.loads((folder / "summary.json").read_text())))
    table = seeds_table.render(rows)
    click.echo(table)
    if write_readme:
        seeds_table.replace_in(Path("README.md"), table)
    missed = seeds_table.missed_bars(rows)
    if missed:
        raise connection.ClientError("bars missed: " + "; ".join(missed))
