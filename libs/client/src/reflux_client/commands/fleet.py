"""reflux topology, checkpoints: what the cluster has and what is stored."""

import asyncio
import time

import click
from rich.console import Console
from rich.table import Column, Table
from rich.tree import Tree

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux.checkpoint.v1.checkpoint_pb2 import Checkpoint
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_client import connection
from reflux_client.commands.topology_simulate import simulate


@click.group(invoke_without_command=True)
@click.pass_context
def topology(context: click.Context) -> None:
    """Show the cluster as a tree with free and total resources; or simulate one."""
    if context.invoked_subcommand is None:
        Console().print(asyncio.run(_topology()))


topology.add_command(simulate)


async def _topology() -> Tree:
    async with connection.channel("scheduler") as channel:
        answer = await SchedulerServiceStub(channel).GetTopology(scheduler_pb.GetTopologyRequest())
    tree = Tree(f"[bold]{answer.cluster}[/bold]")
    branches: dict[str, Tree] = {}
    for node in answer.nodes:
        *domains, leaf = node.path.split("/")[1:]
        parent = tree
        for depth, name in enumerate(domains):
            path = "/".join(domains[: depth + 1])
            parent = branches.setdefault(path, parent.add(name) if path not in branches else parent)
            parent = branches[path]
        free, total = node.free, node.capacity
        gib = total.memory_bytes / 2**30
        label = f"{leaf}: {free.gpus:g}/{total.gpus:g} GPUs, {free.cpus:g}/{total.cpus:g} cores free, {gib:.0f} GiB"
        label += "" if node.agent_address else " [dim](no agent)[/dim]"
        parent.add(label + (f" [cyan]{', '.join(node.jobs)}[/cyan]" if node.jobs else ""))
    return tree


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
