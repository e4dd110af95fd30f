"""The `reflux` command: one group, one module per subject."""

import sys

import click
import grpc

from reflux_client.commands.cluster import queues
from reflux_client.commands.demo import demo, demo_seeds
from reflux_client.commands.fleet import checkpoints, topology
from reflux_client.commands.fork import fork
from reflux_client.commands.inspect import logs, report, trace
from reflux_client.commands.jobs import jobs
from reflux_client.commands.ladder import ladder
from reflux_client.commands.runs import cancel, pause, resume, run, runs, watch
from reflux_client.commands.stack import down, status, token, up
from reflux_client.commands.tasks import tasks
from reflux_client.commands.verifications import verifications
from reflux_client.commands.weights import weights
from reflux_client.connection import ClientError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reflux-client")
def cli() -> None:
    """Reinforcement learning for science: start a stack, run a file, watch it learn.

    \b
    reflux up                                     start the local stack
    reflux run examples/xrd-phase-id/run.toml     train, with live progress
    reflux trace <run>/<prompt>                   where one sample spent its time
    reflux down                                   stop the stack
    """


for command in (up, down, status, token, run, runs, watch, pause, resume, cancel, fork, logs, trace, report, topology):
    cli.add_command(command)
for command in (jobs, queues, verifications, ladder, weights, checkpoints, tasks, demo, demo_seeds):
    cli.add_command(command)


def main() -> None:
    """Entry point: known trouble is one line on stderr and status 2; Ctrl-C is status 130."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        print("reflux: interrupted", file=sys.stderr)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ClientError as error:
        print(f"reflux: {error}", file=sys.stderr)
        sys.exit(2)
    except grpc.aio.AioRpcError as error:
        print(f"reflux: the stack answered {error.code().name}: {error.details()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
