"""reflux tasks rows, reflux tasks serve: a task of reflux for trainers that speak NeMo Gym's /verify."""

import asyncio
import contextlib
import json
import signal
import tempfile
from pathlib import Path

import click
from aiohttp import web

from reflux_client import connection
from reflux_client.connection import ClientError
from reflux_client.verify_door import VerifyDoor, rows


@click.command("rows")
@click.argument("task")
@click.option("--verifier", required=True, help="The verifier of the task that grades, for example rule.")
@click.option("--split", type=click.Choice(["train", "heldout"]), default="train", show_default=True)
@click.option("--count", type=click.IntRange(1, 10_000_000), default=1000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def task_rows(task: str, verifier: str, split: str, count: int, seed: int) -> None:
    """Print problems of TASK as JSONL rows for a /verify server (`reflux tasks serve`)."""
    try:
        from reflux_tasks.registry import UnknownTask, create_task
    except ModuleNotFoundError as error:
        raise ClientError(f"{error}: install the package reflux-tasks where this command runs") from error
    with tempfile.TemporaryDirectory() as cache:
        try:
            made = create_task(task, seed, Path(cache))
        except UnknownTask as error:
            raise ClientError(str(error)) from error
        if verifier not in made.verifiers:
            raise ClientError(f"{task} has no verifier {verifier!r}; it has {', '.join(made.verifiers)}")
        for row in rows(made, verifier, split, count):
            click.echo(json.dumps(row))


@click.command("serve")
@click.option("--listen", default="127.0.0.1:8090", show_default=True, help="HTTP address.")
@click.option("--run", default="verify", show_default=True, help="Run that the verifications belong to.")
@click.option("--deadline", type=click.FloatRange(0.1, 86400), default=600.0, show_default=True, help="Seconds each.")
def serve_tasks(listen: str, run: str, deadline: float) -> None:
    """Serve the installed tasks behind /verify: the stack's sandbox grades. Loopback, unless you say otherwise.

    The door asks nobody for a password: put it where only your trainer reaches it.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ClientError(f"--listen {listen!r} is not HOST:PORT")
    asyncio.run(_serve(host, int(port), run, deadline))


async def _serve(host: str, port: int, run: str, deadline_seconds: float) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connection.channel("sandbox"))
        runner = web.AppRunner(VerifyDoor(channel, run, deadline_seconds).application(), handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ClientError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        click.echo(f"/verify on http://{host}:{runner.addresses[0][1]}; stop with Ctrl-C")
        await stopped.wait()
