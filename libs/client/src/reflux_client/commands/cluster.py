"""reflux topology [drain | undrain | whatif], reflux queues: the nodes, and what the scheduler would do with them."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Column, Table
from rich.tree import Tree

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import job_pb2
from reflux.scheduler.v1 import scheduler_service_pb2 as pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_client import connection
from reflux_client.connection import ClientError

_GANG = re.compile(r"([a-z0-9][a-z0-9_-]*)=(\d+)x(\d+)(?:/(\d+))?")
_ADDED = re.compile(r"([^=]+)=(.+)")
_MANY_NODES = 200
_STYLES = {"up": "green", "draining": "yellow", "flapping": "magenta", "down": "red"}


def ask(call: Callable[[Any], Awaitable[Any]]) -> Any:
    """One call of the scheduler; gangs and clusters may be larger than gRPC's default message."""

    async def run() -> Any:
        async with connection.channel("scheduler", max_message_mib=64) as channel:
            return await call(SchedulerServiceStub(channel))

    return asyncio.run(run())


def show(as_json: bool) -> None:
    """Prints the tree, or the answer itself."""
    answer = ask(lambda stub: stub.GetTopology(pb.GetTopologyRequest()))
    if as_json:
        click.echo(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        Console().print(_tree(answer))


def _tree(answer: pb.GetTopologyResponse) -> Tree:
    sums = _sums(answer)
    levels = " > ".join(reversed(answer.levels))
    tree = Tree(
        f"[bold]{answer.cluster}[/bold] {_figures(sums[answer.cluster])} [dim]({answer.backend}: {levels})[/dim]"
    )
    branches: dict[str, Tree] = {}
    for node in answer.nodes:
        *domains, leaf = node.path.split("/")
        parent = tree
        for depth in range(1, len(domains)):
            path = "/".join(domains[: depth + 1])
            if path not in branches:
                branches[path] = parent.add(f"{domains[depth]} {_figures(sums[path])}")
            parent = branches[path]
        # Of a large cluster only nodes that are not plainly empty or plainly full and up are worth a line.
        if len(answer.nodes) <= _MANY_NODES or node.state != "up" or node.spare:
            parent.add(_node_line(leaf, node))
    return tree


def _sums(answer: pb.GetTopologyResponse) -> dict[str, list[float]]:
    """Free GPUs, GPUs, free cores, cores, nodes, nodes that are not up, per domain path."""
    sums: dict[str, list[float]] = {}
    for node in answer.nodes:
        parts = node.path.split("/")[:-1]
        amounts = (
            node.free.gpus, node.capacity.gpus, node.free.cpus, node.capacity.cpus, 1, node.state not in ("", "up")
        )  # fmt: skip
        for depth in range(1, len(parts) + 1):
            row = sums.setdefault("/".join(parts[:depth]), [0.0] * 6)
            for column, amount in enumerate(amounts):
                row[column] += amount
    return sums


def _figures(row: list[float]) -> str:
    text = f"{row[0]:g}/{row[1]:g} GPUs, {row[2]:g}/{row[3]:g} cores free, {row[4]:.0f} nodes"
    return text + (f", [red]{row[5]:.0f} not up[/red]" if row[5] else "")


def _node_line(leaf: str, node: pb.TopologyNode) -> str:
    free, total = node.free, node.capacity
    gib = total.memory_bytes / 2**30
    line = f"{leaf}: {free.gpus:g}/{total.gpus:g} GPUs, {free.cpus:g}/{total.cpus:g} cores free, {gib:.0f} GiB"
    if node.state not in ("", "up"):
        line += f" [{_STYLES.get(node.state, 'red')}]{node.state}[/]" + (f" ({node.reason})" if node.reason else "")
    line += " [blue]spare[/blue]" if node.spare else ""
    return line + (f" [cyan]{', '.join(node.jobs)}[/cyan]" if node.jobs else "")


@click.command()
@click.argument("node")
@click.option("--reason", default="", help="Why, for people.")
def drain(node: str, reason: str) -> None:
    """Let NODE run empty: no new work; members move at their next checkpoint when there is room elsewhere."""
    answer = ask(lambda stub: stub.DrainNode(pb.DrainNodeRequest(node=node, reason=reason)))
    held = f"; still there: {', '.join(answer.node.jobs)}" if answer.node.jobs else "; it is empty"
    click.echo(f"{answer.node.path} is {answer.node.state}{held}")


@click.command()
@click.argument("node")
def undrain(node: str) -> None:
    """Open a drained NODE again."""
    answer = ask(lambda stub: stub.UndrainNode(pb.UndrainNodeRequest(node=node)))
    click.echo(f"{answer.node.path} is {answer.node.state}")


@click.command()
@click.option("--gang", multiple=True, metavar="ROLE=COUNTxGPUS[/SEGMENT]", help="A job's role; repeat for more roles.")
@click.option("--level", default="", help="Level that has to hold the whole gang.")
@click.option("--queue", default="", help="Queue of the job.")
@click.option("--priority", default=0, show_default=True, help="Its priority.")
@click.option("--drain", "drained", multiple=True, metavar="NODE", help="A node that is drained.")
@click.option("--remove", multiple=True, metavar="NODE", help="A node that is gone.")
@click.option("--add", multiple=True, metavar="NAME=NODE", help="A new node beside NODE and of its size.")
@click.option("--end", multiple=True, metavar="JOB", help="A job that ends.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def whatif(
    gang: tuple[str, ...], level: str, queue: str, priority: int, drained: tuple[str, ...], remove: tuple[str, ...],
    add: tuple[str, ...], end: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Say what the scheduler would do after a change, without changing anything.

    \b
    reflux topology whatif --gang learner=64x4/16 --gang decode=8x4 --level block
    reflux topology whatif --drain gb017 --remove gb018
    """
    request = pb.SimulateRequest(
        add_nodes=[_added(each) for each in add], remove_nodes=remove, drain_nodes=drained, end_jobs=map(_job_name, end)
    )
    if gang:
        roles = [_role(each) for each in gang]
        request.job.CopyFrom(pb.CreateJobRequest(roles=roles, required_level=level, queue=queue, priority=priority))
    answer = ask(lambda stub: stub.Simulate(request))
    if as_json:
        click.echo(MessageToJson(answer, preserving_proto_field_name=True))
        return
    click.echo(answer.sentence)
    table = Table("job", "outcome", Column("where", overflow="fold"), Column("why", overflow="fold"))
    for each in answer.outcomes:
        table.add_row(each.job, each.outcome, each.domain, each.sentence)
    if answer.outcomes:
        Console().print(table)
    click.echo(f"{answer.held_gpus:g} of {answer.total_gpus:g} GPUs held afterwards")


def _role(text: str) -> job_pb2.RoleSpec:
    match = _GANG.fullmatch(text)
    if match is None:
        raise ClientError(
            f"--gang {text}: write ROLE=COUNTxGPUS or ROLE=COUNTxGPUS/SEGMENT, for example learner=64x4/16"
        )
    role, count, gpus, segment = match.groups()
    return job_pb2.RoleSpec(
        role=role,
        count=int(count),
        argv=["true"],
        resources=common_pb2.Resources(gpus=int(gpus)),
        segment_size=int(segment or 0),
    )


def _added(text: str) -> pb.SimulatedNode:
    match = _ADDED.fullmatch(text)
    if match is None:
        raise ClientError(f"--add {text}: write NAME=NODE, the new node's name and one that it is like")
    return pb.SimulatedNode(name=match[1], like=match[2])


def _job_name(text: str) -> str:
    return text if text.startswith("jobs/") else f"jobs/{text}"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def queues(as_json: bool) -> None:
    """List the queues: share, what they use, who waits."""
    answer = ask(lambda stub: stub.ListQueues(pb.ListQueuesRequest()))
    if as_json:
        click.echo(MessageToJson(answer, preserving_proto_field_name=True))
        return
    table = Table("queue", "weight", "GPUs used", "guaranteed", "limit", "cores used", "placed", "pending")
    for queue in answer.queues:
        name = f"{queue.parent}/{queue.name}" if queue.parent else queue.name
        limit = f"{queue.limit.gpus:g}" if queue.HasField("limit") else "-"
        table.add_row(
            name, f"{queue.weight:g}", f"{queue.used.gpus:g}", f"{queue.guaranteed.gpus:g}", limit,
            f"{queue.used.cpus:g}", str(queue.placed_jobs), str(queue.pending_jobs),
        )  # fmt: skip
    Console().print(table)
