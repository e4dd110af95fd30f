"""reflux tasks validate | check: how good a task's verifiers are on measured data, and what they say of one answer."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from reflux_client.commands.tasks_new import list_tasks, new_task
from reflux_client.commands.tasks_serve import serve_tasks, task_rows
from reflux_client.connection import ClientError

_WAY_OUT = "install the package reflux-tasks where this command runs"
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def tasks() -> None:
    """Tasks: what is installed, a new one of your own, and verifiers on measured data."""


for command in (list_tasks, new_task, serve_tasks, task_rows):
    tasks.add_command(command)


@tasks.group()
def validate() -> None:
    """Validate a task's verifiers on measured data; prints figures as JSON, status 1 when one misses its bar."""


@validate.command()
@click.option("--data", required=True, type=_FOLDER, help="Folder of weighed mixtures: A_0p6-B_0p4--8min.xrdml, ...")
@click.option("--candidates", type=_FOLDER, help="Folder of candidate CIFs [default: those that come with the task].")
@click.option("--quick", is_flag=True, help="Longest scan of each mixture, single replacements, 3 additions.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Refinements at once [default: one per core].")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file, too.")
def xrd(data: Path, candidates: Path | None, quick: bool, workers: int | None, out: Path | None) -> None:
    """Rietveld verifier on weighed powder mixtures: is the true phase set first, and accepted?

    The file names say the truth: NAME_FRACTION joined by "-", the decimal point written as p. NAME is the name of a
    candidate file, or a formula that only one of them has. Other files are left out and listed.
    """
    if out is not None and not out.parent.is_dir():
        raise ClientError(f"cannot write {out}: there is no folder {out.parent}")
    try:
        report = _validate_xrd(data, candidates, quick, workers)
    except ModuleNotFoundError as error:
        raise ClientError(f"{error}: {_WAY_OUT}") from error
    text = json.dumps(report)
    click.echo(text)
    if out is not None:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ClientError(f"cannot write {out}: {error.strerror}") from error
    if report["missed"]:
        figures = ", ".join(f"{name} {report[name]} (needs {report['bars'][name]})" for name in report["missed"])
        click.echo(f"reflux: missed: {figures}", err=True)
        sys.exit(1)


@tasks.group()
def check() -> None:
    """Judge an answer about a laboratory's own data; prints the verdict as JSON, status 1 when it is not accepted."""


@check.command("xrd")
@click.argument("pattern", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("phases", nargs=-1, required=True)
@click.option("--candidates", type=_FOLDER, help="Folder of candidate CIFs [default: those that come with the task].")
def check_xrd(pattern: Path, phases: tuple[str, ...], candidates: Path | None) -> None:
    """Refine PHASES, names of candidate files, against a measured PATTERN (Cu K-alpha).

    NAME=FRACTION claims a mass fraction, which is compared with the refined one.

    \b
    reflux tasks check xrd sample.xrdml TiO2=0.4 ZnO=0.6 --candidates structures/
    """
    try:
        grade = _check_xrd(pattern, phases, candidates)
    except ModuleNotFoundError as error:
        raise ClientError(f"{error}: {_WAY_OUT}") from error
    click.echo(json.dumps(grade))
    if not grade.get("accepted"):
        sys.exit(1)


def _check_xrd(pattern: Path, phases: tuple[str, ...], candidates: Path | None) -> dict[str, Any]:
    from reflux_tasks.verify import VerificationError, VerifierUnavailable
    from reflux_tasks.xrd.measured import MeasuredVerifier
    from reflux_tasks.xrd.measured_payload import measured_payload
    from reflux_tasks.xrd.structure_files import SHIPPED

    try:
        payload = measured_payload(pattern, candidates or SHIPPED)
        claims = [" ".join(phase.rsplit("=", 1)) for phase in phases]
        [grade] = MeasuredVerifier().grade(payload, [" <sep> ".join(claims) + " <eos>"])
    except (VerificationError, VerifierUnavailable, ValueError, OSError) as error:
        raise ClientError(f"cannot check: {error}") from error
    return {"outcome": grade.outcome, "reward": round(grade.reward, 4), **grade.detail}


def _validate_xrd(data: Path, candidates: Path | None, quick: bool, workers: int | None) -> dict[str, Any]:
    from reflux_tasks.verify import VerifierUnavailable
    from reflux_tasks.xrd.refinement_pool import RefinementPool
    from reflux_tasks.xrd.structure_files import SHIPPED, read_folder
    from reflux_tasks.xrd.validation import Validator, find_scans
    from reflux_tasks.xrd.validation_report import report

    try:
        usable, refused = read_folder(candidates or SHIPPED)
        if not usable:
            raise ClientError(f"cannot validate: no structure can be used: {'; '.join(list(refused.values())[:3])}")
        scans, skipped = find_scans(data, usable, quick)
        with _interruptible(), RefinementPool(workers) as pool, _progress() as show:
            validator = Validator(usable, pool, quick=quick)
            results = [
                validator.run(
                    scan, lambda done, total, i=i, scan=scan: show(f"{i}/{len(scans)} {scan.path.name}", done, total)
                )
                for i, scan in enumerate(scans, 1)
            ]
    except (VerifierUnavailable, OSError) as error:
        raise ClientError(f"cannot validate: {error}") from error
    return {
        **report(results),
        "quick": quick,
        "candidates": sorted(usable),
        "refused_candidates": refused,
        "skipped": skipped,
    }


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, one line per scan where it is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        known: dict[str, Any] = {}

        def show(scan: str, done: int, total: int) -> None:
            if scan not in known:
                known[scan] = bars.add_task(scan, total=total)
            bars.update(known[scan], completed=done)
            if done == total and not console.is_terminal:
                click.echo(f"{scan}: {total} refinements", err=True)

        yield show


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that refinements under way end with it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
