"""reflux up, down, status, token: the local stack as a whole."""

import asyncio
import re
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux.sandbox.v1 import sandbox_service_pb2 as sandbox_pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker_pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_client import connection, stack
from reflux_client.commands.weights import paths_table
from reflux_kit import auth

_PORT = click.IntRange(0, 65535)


@click.command()
@click.option("--state-dir", type=click.Path(path_type=Path), default=connection.state_dir, help="folder of the stack")
@click.option("--gateway-port", type=_PORT, default=0, help="port of the OpenAI API (0: a free one)")
@click.option("--trainer-port", type=_PORT, default=0, help="port of /v1/runs and the dashboard (0: a free one)")
def up(state_dir: Path, gateway_port: int, trainer_port: int) -> None:
    """Start the local stack; returns when all services serve."""
    record = connection.read_record(state_dir)
    if record is not None:
        click.echo(f"the stack runs already (process {record.pid})")
    else:
        record = stack.start(state_dir, gateway_port=gateway_port, trainer_port=trainer_port)
    click.echo(f"OpenAI API  http://{record.http['inference-gateway']}/v1")
    click.echo(f"runs        http://{record.http['trainer']}/")
    click.echo(f"state       {record.state_dir}")
    if record.state_dir != connection.state_dir():
        click.echo(f"other commands find this stack with: export REFLUX_STATE_DIR={record.state_dir}")


@click.command()
@click.option("--state-dir", type=click.Path(path_type=Path), default=connection.state_dir, help="folder of the stack")
def down(state_dir: Path) -> None:
    """Stop the local stack and everything that it started."""
    click.echo("stopped" if stack.stop(state_dir) else f"no stack runs in {state_dir}")


@click.command()
def status() -> None:
    """Show processes, replicas and the sandbox of the stack."""
    console = Console()
    record = connection.read_record()
    if record is not None:
        table = Table("process", "pid", "restarts", "gRPC", "HTTP", title=f"local stack in {record.state_dir}")
        for name, pid in record.pids.items():
            ends = (record.grpc.get(name, ""), record.http.get(name, ""))
            table.add_row(name, str(pid), str(record.restarts[name]), *ends)
        console.print(table)
    asyncio.run(_show_services(console))


async def _show_services(console: Console) -> None:
    async with connection.channel("inference-gateway") as channel:
        fleet = await InferenceGatewayServiceStub(channel).ListReplicas(gateway_pb.ListReplicasRequest())
    table = Table(
        Column("replica", overflow="fold"),
        "model",
        "state",
        "version",
        "sequences",
        "address",
        title="inference replicas",
    )
    for each in fleet.replicas:
        state = Replica.State.Name(each.state).removeprefix("STATE_").lower()
        if each.health == Replica.HEALTH_UNHEALTHY:
            state = f"unhealthy: {each.health_reason}"
        table.add_row(each.name, each.model_id, state, str(each.version), str(each.sequences), each.grpc_address)
    console.print(table)
    async with connection.channel("sandbox") as channel:
        found = await SandboxServiceStub(channel).GetStatus(sandbox_pb.GetStatusRequest())
    console.print(f"sandbox: tier [bold]{found.tier}[/bold], {found.idle_children} idle, {found.busy_children} busy")
    for reason in found.reasons:
        console.print(f"  {reason}")
    async with connection.channel("weight-broker") as channel:
        paths = await WeightBrokerServiceStub(channel).ListPaths(broker_pb.ListPathsRequest())
    if paths.processes:
        console.print(paths_table(paths))


@click.command()
@click.option("--run", "run_name", default="", help="restrict the token to one run")
@click.option("--tenant", default="", help="restrict the token to the runs of a tenant, under its quota")
def token(run_name: str, tenant: str) -> None:
    """Print a bearer token for HTTP calls, signed with REFLUX_STACK_SECRET."""
    secret = connection.settings().stack_secret
    if not secret:
        raise connection.ClientError(
            "this stack has no secret, so calls need no token (set REFLUX_STACK_SECRET to require one)"
        )
    if run_name and tenant:
        raise click.UsageError("--run and --tenant exclude each other")
    if tenant and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
        raise click.UsageError("a tenant's name has 1 to 64 of A-Z a-z 0-9 . _ -")
    click.echo(auth.mint(secret, tenant or "operator", run=run_name, tenant=tenant))
