"""reflux topology simulate: what a policy would do with a cluster and a load, next to its rivals."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Column, Table

from reflux_client.connection import ClientError

if TYPE_CHECKING:
    from reflux_placement.simulate.compare import Comparison, Trial, WorkloadOf
    from reflux_placement.simulate.engine import Progress
    from reflux_placement.simulate.jobs import Options, Policy
    from reflux_placement.topology import Topology

RL_MIX = "rl-mix"
_REPORT_EVERY_SECONDS = 0.5


@click.command()
@click.option("--trace", required=True, help=f"openb task list (CSV), or {RL_MIX!r} for synthetic jobs of roles.")
@click.option("--cluster", required=True, type=click.Path(path_type=Path), help="TOML or openb node list (CSV).")
@click.option("--policy", default="reflux", show_default=True, help="Policy to look at; 'list' names them.")
@click.option("--compare", multiple=True, help="Rival to run on the same jobs; repeat it, or say 'all'.")
@click.option("--sizes", default="log2", show_default=True, help="Gang sizes of a trace: log2, acme or trace.")
@click.option("--load", type=float, help="Scale arrivals to this offered load (rl-mix: 0.85 if not given).")
@click.option("--jobs", type=int, help="Only the first N tasks (rl-mix: N arrivals, 2000 if not given).")
@click.option("--scale", default=1, show_default=True, help="rl-mix: factor for the jobs of several racks.")
@click.option("--slowdown", default=0.0, show_default=True, help="Longer run per share of traffic between racks.")
@click.option("--seed", default=0, show_default=True, help="First seed of everything drawn.")
@click.option("--seeds", default=1, show_default=True, help="Number of seeds; several give bars over seeds.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write a report (HTML, self-contained).")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object with all figures.")
def simulate(
    trace: str, cluster: Path, policy: str, compare: tuple[str, ...], sizes: str, load: float | None, jobs: int | None,
    scale: int, slowdown: float, seed: int, seeds: int, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay a load on a cluster under a policy, as discrete events over the scheduler's own policy code.

    \b
    reflux topology simulate --trace pods.csv --cluster configs/clusters/openb.toml --compare all --out report.html
    reflux topology simulate --trace rl-mix --cluster configs/clusters/gb200-32-racks.toml
    """
    # Loaded here: no other command needs the simulator.
    from reflux_placement.simulate.jobs import Options
    from reflux_placement.simulate.policies import POLICIES, chosen

    if policy == "list":
        click.echo("\n".join(POLICIES))
        return
    _check_counts(seeds=seeds, scale=scale, jobs=jobs)
    if out is not None and not out.resolve().parent.is_dir():
        raise ClientError(f"{out}: the folder {out.resolve().parent} does not exist")
    try:
        policies = chosen([policy, *compare])
        topology = _read_cluster(cluster)
        workload_of = _workload_of(trace, topology, sizes=sizes, load=load, jobs=jobs, scale=scale)
        options = Options(cross_rack_slowdown=slowdown)
        comparison, seconds = _run(topology, workload_of, policies, range(seed, seed + seeds), options)
    except ValueError as error:
        raise ClientError(str(error)) from error
    _show(comparison, seconds)
    if out is not None:
        _write(out, comparison)
    if as_json:
        click.echo(json.dumps(_data(comparison, topology, seconds)))


def _check_counts(*, seeds: int, scale: int, jobs: int | None) -> None:
    for name, value in (("--seeds", seeds), ("--scale", scale), ("--jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise ClientError(f"{name} {value}: write a number of one or more")


def _read_cluster(path: Path) -> Topology:
    from reflux_placement.simulate.files import read_cluster

    return read_cluster(path)


def _workload_of(
    trace: str, topology: Topology, *, sizes: str, load: float | None, jobs: int | None, scale: int
) -> WorkloadOf:
    """The workload of a seed; files are read here, once."""
    from reflux_placement.simulate.files import read_tasks
    from reflux_placement.simulate.openb import SIZES, openb_workload
    from reflux_placement.simulate.rl_mix import rl_workload

    if load is not None and load <= 0:
        raise ClientError(f"--load {load}: write a share above zero, such as 0.85")
    if trace == RL_MIX:
        wanted, count = 0.85 if load is None else load, 2_000 if jobs is None else jobs
        return lambda seed: rl_workload(topology, jobs=count, load=wanted, scale=scale, seed=seed)
    if sizes not in SIZES:
        raise ClientError(f"--sizes {sizes}: there is {', '.join(SIZES)}")
    tasks = read_tasks(Path(trace))[:jobs]
    return lambda seed: openb_workload(tasks, topology, sizes=SIZES[sizes], seed=seed, load=load)


def _run(
    topology: Topology, workload_of: WorkloadOf, policies: dict[str, Policy], seeds: range, options: Options
) -> tuple[Comparison, dict[str, float]]:
    """All trials, and the seconds that each policy took for all its seeds."""
    from reflux_placement.simulate.compare import Comparison, trials

    notes: tuple[str, ...] = ()
    done: list[Trial] = []
    seconds = dict.fromkeys(policies, 0.0)
    line = _ProgressLine(len(policies) * len(seeds))
    started = time.perf_counter()
    for trial, workload in trials(topology, workload_of, policies, seeds, options=options, progress=line.begin):
        seconds[trial.policy] += time.perf_counter() - started
        notes = notes or workload.notes
        done.append(trial)
        started = time.perf_counter()
    line.end()
    if options.cross_rack_slowdown:
        notes = (*notes, f"a gang runs 1 + {options.cross_rack_slowdown:g} x (its traffic share between racks) as long")
    return Comparison(notes, tuple(done)), seconds


class _ProgressLine:
    """One line on stderr, rewritten on a terminal; otherwise one line per trial."""

    def __init__(self, total: int) -> None:
        self._total, self._number, self._last = total, 0, 0.0
        self._terminal = sys.stderr.isatty()

    def begin(self, policy: str, seed: int) -> Progress:
        """Announces a trial; the result is told after every cycle."""
        self._number += 1
        head = f"simulate {self._number}/{self._total}: {policy}, seed {seed}"
        if not self._terminal:
            print(head, file=sys.stderr, flush=True)

        def tell(now: float, ended: int, pending: int) -> None:
            at = time.perf_counter()
            if self._terminal and at - self._last > _REPORT_EVERY_SECONDS:
                self._last = at
                text = f"{head}: day {now / 86_400:.1f}, {ended:,} jobs ended, {pending:,} wait"
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

        return tell

    def end(self) -> None:
        """Clears the line."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show(comparison: Comparison, seconds: dict[str, float]) -> None:
    from reflux_client.report.simulation import cluster_line, table_rows

    click.echo(cluster_line(comparison.trials[0].history.topology))
    for note in comparison.notes:
        click.echo(f"- {note}")
    table = Table("", *(Column(policy, justify="right") for policy in comparison.policies))
    for label, cells in table_rows(comparison):
        table.add_row(label, *(f"{value}\n[dim]{bar}[/dim]" if bar else value for value, bar in cells))
    table.add_row("simulated in", *(f"{seconds[policy]:.1f} s" for policy in comparison.policies))
    Console().print(table)


def _write(out: Path, comparison: Comparison) -> None:
    from reflux_client.report.simulation import write_report

    try:
        write_report(out, comparison)
    except OSError as error:
        raise ClientError(f"{out} cannot be written: {error}") from error
    click.echo(f"report: {out}")


def _data(comparison: Comparison, topology: Topology, seconds: dict[str, float]) -> dict[str, object]:
    from reflux_placement.simulate.compare import as_data

    cluster = {
        "name": topology.name,
        "nodes": topology.num_nodes,
        "gpus": int(topology.capacity_NR[:, 0].sum()),
    }
    return {"cluster": cluster, **as_data(comparison), "seconds": {name: round(s, 2) for name, s in seconds.items()}}
