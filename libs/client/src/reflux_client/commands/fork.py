"""reflux fork: a run of its own from a checkpoint of another one."""

import asyncio
import sys
import uuid
from pathlib import Path

import click

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection
from reflux_client.commands.runs import follow, resource_of
from reflux_client.runfile import load_changes


@click.command()
@click.argument("name", metavar="RUN")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--checkpoint", default="", metavar="NAME", help="start from this one instead of RUN's newest")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="change one key, such as rl.steps=300")
@click.option("--detach", is_flag=True, help="return as soon as the run is accepted")
def fork(name: str, file: Path | None, checkpoint: str, settings: tuple[str, ...], detach: bool) -> None:
    """Start a run from a checkpoint of RUN, with the keys of FILE (a part of a run file) and of --set changed.

    Task, model, warm-up and seed stay; rl.steps counts from the beginning of RUN.
    """
    request = pb.ForkRunRequest(
        request_id=str(uuid.uuid4()),
        name=resource_of(name),
        checkpoint=checkpoint,
        changes=load_changes(file, settings),
    )
    made = asyncio.run(_fork(request))
    click.echo(f"run {made.name.removeprefix('runs/')} starts from {made.forked_from}")
    if not detach:
        sys.exit(0 if follow(made.name) else 1)


async def _fork(request: pb.ForkRunRequest) -> Run:
    async with connection.channel("trainer") as channel:
        return (await TrainerServiceStub(channel).ForkRun(request)).run
