"""reflux topology, checkpoints: what the cluster has and what is stored."""

import asyncio
import time

import click
from rich.console import Console
from rich.table import Column, Table

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux.checkpoint.v1.checkpoint_pb2 import Checkpoint
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux_client import connection
from reflux_client.commands.cluster import drain, show, undrain, whatif
from reflux_client.commands.topology_simulate import simulate


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
@click.pass_context
def topology(context: click.Context, as_json: bool) -> None:
    """Show the cluster as a tree: free and total resources, conditions, jobs. Or drain, ask what if, simulate."""
    if context.invoked_subcommand is None:
        show(as_json)


for command in (drain, undrain, whatif, simulate):
    topology.add_command(command)


@click.command()
@click.argument("run", default="")
def checkpoints(run: str) -> None:
    """List checkpoints, newest first; RUN restricts them to one run."""
    asyncio.run(_checkpoints(run))


async def _checkpoints(run: str) -> None:
    async with connection.channel("checkpoint") as channel:
        answer = await CheckpointServiceStub(channel).ListCheckpoints(checkpoint_pb.ListCheckpointsRequest(run=run))
    table = Table(Column("checkpoint", overflow="fold"), "step", "state", "committed", "MB")
    for each in answer.checkpoints:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.committed_at)) if each.committed_at else "-"
        size = sum(stored.size_bytes for stored in each.objects) / 1e6
        state = Checkpoint.State.Name(each.state).removeprefix("STATE_").lower()
        table.add_row(each.name, str(each.step), state, when, f"{size:.1f}")
    if answer.checkpoints:
        click.echo(f"store {answer.checkpoints[0].store_url}")
    Console().print(table)
