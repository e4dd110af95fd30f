"""reflux tasks new, reflux tasks list: a lab's own task from a scaffold, and what is installed."""

import keyword
import re
import tempfile
from importlib import resources
from importlib.metadata import entry_points
from importlib.resources.abc import Traversable
from pathlib import Path

import click
import jinja2
from rich.console import Console
from rich.table import Table

from reflux_client.connection import ClientError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 40
_WIDE = 200


@click.command("new")
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="Where to write; default: ./NAME.")
def new_task(name: str, folder: Path | None) -> None:
    """Write a task NAME of your own: a distribution with problems, parser, verifier, tests and a run file.

    It works as it is. Install it (pip install -e NAME), start the stack again and run NAME/run.toml.
    """
    target = folder or Path(name)
    for path in write_scaffold(name, target):
        click.echo(f"wrote {path}")
    click.echo(f"next: pip install -e '{target}[test]' && pytest {target} && reflux up && reflux run {target}/run.toml")


@click.command("list")
def list_tasks() -> None:
    """List the installed tasks with their verifiers; a task that does not load says why."""
    try:
        from reflux_tasks.registry import GROUP, create_task
    except ModuleNotFoundError as error:
        raise ClientError(f"{error}: install the package reflux-tasks where this command runs") from error
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)  # for a file or another program: a row is a line, with whole names
    table = Table("task", "from", "verifier", "version", "fidelity", "CPU s", "equal by")
    with tempfile.TemporaryDirectory() as cache:
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            source = entry.dist.name if entry.dist else ""
            try:
                verifiers = create_task(entry.name, 0, Path(cache)).verifiers
            except Exception as error:  # task boundary: one broken plug-in must not hide the others
                table.add_row(entry.name, source, f"does not load: {type(error).__name__}: {error}")
                continue
            for key, verifier in verifiers.items():
                row = (key, verifier.version, verifier.fidelity, f"{verifier.cost_seconds:g}", verifier.canonical_form)
                table.add_row(entry.name, source, *row)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def write_scaffold(name: str, target: Path) -> list[Path]:
    """Writes the files of a new task below `target`; raises ClientError for a bad name or a folder with files in it."""
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME or keyword.iskeyword(package):
        raise ClientError(f"{name!r} is no name for a task: use a-z, 0-9 and single hyphens, for example my-alloys")
    if package.startswith("reflux"):
        raise ClientError(f"{name!r}: names that start with reflux belong to reflux itself")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ClientError(f"{target} is there already and not an empty folder")
    values = {"name": name, "package": package, "cls": "".join(part.capitalize() for part in name.split("-"))}
    root = resources.files("reflux_client").joinpath("scaffold")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    written = []
    for source, place in _templates(root, Path()):
        folder = Path("src", package) if place == Path("src") else place
        path = target / folder / source.name.removesuffix(".j2")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.from_string(source.read_text()).render(values))
        written.append(path)
    return written


def _templates(folder: Traversable, place: Path) -> list[tuple[Traversable, Path]]:
    found: list[tuple[Traversable, Path]] = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found += _templates(each, place / each.name)
        elif each.name.endswith(".j2"):
            found.append((each, place))
    return found
