"""reflux logs, trace, report: what happened."""

from pathlib import Path

import click
from rich.console import Console

from reflux_client import connection, tracing

_SAME_JOB_SECONDS = 120.0


@click.command()
@click.argument("process", default="")
@click.option("--lines", "-n", default=40, help="how many of the last lines")
def logs(process: str, lines: int) -> None:
    """Show the last log lines of PROCESS (a service, or a role such as "learner"); without it, list the logs."""
    folder = connection.state_dir() / "logs"
    paths = sorted(folder.rglob("*.log"))
    if not paths:
        raise connection.ClientError(f"no logs below {folder}")
    chosen = [path for path in paths if process in path.relative_to(folder).as_posix()] if process else []
    if process and not chosen:
        raise connection.ClientError(f"no log of {process!r}; there are: {', '.join(path.stem for path in paths)}")
    newest = max((path.stat().st_mtime for path in chosen if path.parent != folder), default=0.0)
    for path in chosen:
        if path.parent != folder and path.stat().st_mtime < newest - _SAME_JOB_SECONDS:
            continue  # a role of an older job: name its folder to see it
        click.secho(str(path.relative_to(folder)), bold=True)
        click.echo("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
    if not process:
        click.echo("\n".join(path.relative_to(folder).as_posix() for path in paths))


@click.command()
@click.argument("sample")
def trace(sample: str) -> None:
    """Print the tree of SAMPLE (<run>/<prompt>[/<index>]): tokens, verification, advantage, step, with durations."""
    run, prompt, index = tracing.parse_sample_id(sample)
    roots = tracing.find_tree(connection.state_dir() / "traces", run, prompt)
    title = f"run {run}, prompt {prompt}" + ("" if index is None else f", sample {index}")
    Console().print(tracing.render(roots, title, index))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def report(folder: Path) -> None:
    """Write report.html of the run in FOLDER again."""
    from reflux_client.report.build import write_report  # charts load slowly: only where they are drawn

    click.echo(write_report(folder))
