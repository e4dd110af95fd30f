"""reflux weights [plan | versions | paths]: how weights travel, which versions there are, what transports reach."""

import asyncio
import json
from pathlib import Path

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Column, Table

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux.weight_broker.v1.weight_version_pb2 import WeightVersion
from reflux_client import connection
from reflux_client.connection import ClientError
from reflux_client.layout_file import load_layouts
from reflux_weightplan.errors import WeightPlanError
from reflux_weightplan.explain import explain
from reflux_weightplan.families.presets import PRESETS
from reflux_weightplan.links import LinkModel
from reflux_weightplan.plan import PlanOptions
from reflux_weightplan.plan import plan as make_plan


@click.group()
def weights() -> None:
    """Show how weights travel from trainers to replicas."""


@weights.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A well-known pair of layouts instead of a file.")
@click.option("--gigabytes-per-second", default=50.0, show_default=True, help="Rate of a port in each direction.")
@click.option("--message-microseconds", default=1.0, show_default=True, help="Cost of one message.")
@click.option(
    "--relay",
    type=click.Choice(["direct", "auto", "relay"]),
    default="direct",
    show_default=True,
    help="direct is what publishers and replicas execute; passing bytes on among ranks is a model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def plan(
    file: Path | None,
    preset: str | None,
    gigabytes_per_second: float,
    message_microseconds: float,
    relay: str,
    as_json: bool,
) -> None:
    """Plan a sync without a cluster: bytes, buckets, makespan, and how near that comes to the bound.

    \b
    FILE names a model and how both sides cut it:
      [model]   preset = "qwen3-30b-a3b"     or config = "folder or config.json"
      [source]  kind = "fsdp", shards = 16    or "fsdp-experts", "parallel", "alone"
      [target]  kind = "parallel", replicas = 4, expert_groups = 2, tensor = 4
    """
    if (file is None) == (preset is None):
        raise ClientError("give a FILE or --preset, one of them")
    source, target = PRESETS[preset].make() if preset else load_layouts(file or Path())
    if gigabytes_per_second <= 0 or message_microseconds < 0:
        raise ClientError("--gigabytes-per-second must be above 0, --message-microseconds 0 or more")
    link = LinkModel(gigabytes_per_second * 1e9, message_microseconds * 1e-6)
    try:
        found = explain(make_plan(source, target, PlanOptions(relay=relay, link=link)))  # pyright: ignore[reportArgumentType]
    except WeightPlanError as error:
        raise ClientError(str(error)) from None
    click.echo(json.dumps(found.json(), indent=2) if as_json else "\n".join(found.lines()))


@weights.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def versions(model: str, as_json: bool) -> None:
    """Show the committed version of MODEL (a run's id) and what every replica serves."""
    asyncio.run(_versions(model, as_json))


async def _versions(model: str, as_json: bool) -> None:
    async with connection.channel("weight-broker") as channel:
        stub = WeightBrokerServiceStub(channel)
        version = (await stub.GetVersion(pb.GetVersionRequest(model_id=model))).version
        replicas = await stub.ListReplicas(pb.ListReplicasRequest(model_id=model))
    if as_json:
        click.echo(MessageToJson(version))
        click.echo(MessageToJson(replicas))
        return
    if version.epoch:
        kind = WeightVersion.Kind.Name(version.kind).removeprefix("KIND_").lower()
        click.echo(
            f"version {version.version} (epoch {version.epoch}, {kind}): {version.bytes / 1e6:.1f} MB, "
            f"prepared in {version.prepare_seconds:.3f} s, committed in {version.commit_seconds:.3f} s"
        )
    else:
        click.echo("nothing is committed yet")
    table = Table(Column("replica", overflow="fold"), "version", "epoch", "pause ms", "from", "fingerprint", "health")
    for each in replicas.replicas:
        health = each.health_reason or "unhealthy" if each.unhealthy else each.error or "ok"
        mark = f"{each.fingerprint:016x}" if each.fingerprint else "-"
        table.add_row(
            each.replica, str(each.version), str(each.epoch), f"{each.pause_ms:.1f}", each.source or "-", mark, health
        )
    Console().print(table)


@weights.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def paths(as_json: bool) -> None:
    """Show what every process measured of its transports, which one it chose, and why."""
    asyncio.run(_paths(as_json))


async def _paths(as_json: bool) -> None:
    async with connection.channel("weight-broker") as channel:
        answer = await WeightBrokerServiceStub(channel).ListPaths(pb.ListPathsRequest())
    if as_json:
        click.echo(MessageToJson(answer))
        return
    Console().print(paths_table(answer))


def paths_table(answer: pb.ListPathsResponse) -> Table:
    """One row per process, transport and peer."""
    table = Table(
        Column("process", overflow="fold"), "transport", "peer", "GB/s", "chosen", Column("why", overflow="fold")
    )
    for process in answer.processes:
        for path in process.paths:
            rate = f"{path.bytes_per_second / 1e9:.2f}" if path.bytes_per_second else "-"
            chosen = "yes" if path.chosen else ""
            table.add_row(process.process, path.transport, path.peer or "-", rate, chosen, path.reason)
    return table
