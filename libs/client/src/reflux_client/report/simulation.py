"""simulation.html: one self-contained page about a simulation, with its policies side by side."""

from pathlib import Path
from typing import Any

import jinja2

from reflux_client.report import simulation_charts as charts
from reflux_placement.simulate.compare import Comparison
from reflux_placement.simulate.figures import NAMES
from reflux_placement.topology import Topology

_TEMPLATE = Path(__file__).with_name("simulation.html.j2")
_ROWS: dict[str, tuple[str, str]] = {
    "utilisation": ("utilisation", "share"),
    "jct_mean": ("completion time, mean", "time"),
    "jct_p50": ("completion time, p50", "time"),
    "jct_p99": ("completion time, p99", "time"),
    "slowdown_mean": ("slowdown, mean", "number"),
    "wait_mean": ("wait, mean", "time"),
    "wait_p50": ("wait, p50", "time"),
    "wait_p99": ("wait, p99", "time"),
    "fragmentation": ("fragmented GPUs", "share"),
    "cross_rack_gangs": ("gangs over several racks", "number"),
    "avoidable_cross_rack_gangs": ("of them such that fit into one", "number"),
    "excess_racks": ("racks used / fewest possible", "number"),
    "cross_block_gangs": ("gangs over several blocks", "number"),
    "cross_rack_traffic": ("traffic between racks", "share"),
    "preemptions": ("preemptions", "number"),
    "lost_gpu_hours": ("work lost, GPU hours", "number"),
    "unfinished": ("jobs that never ended", "number"),
}
assert set(_ROWS) <= set(NAMES)


def write_report(path: Path, comparison: Comparison) -> None:
    """Writes the page. It loads nothing from elsewhere."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    path.write_text(environment.from_string(_TEMPLATE.read_text()).render(_context(comparison)))


def table_rows(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows for people: (label, per policy (value, confidence bar or ""))."""
    rows = []
    for name, (label, unit) in _ROWS.items():
        cells = []
        for policy in comparison.policies:
            bar = comparison.bar(policy, name)
            text = f"{_told(bar.low, unit)} .. {_told(bar.high, unit)}" if bar is not None else ""
            cells.append((_told(comparison.value(policy, name), unit), text))
        rows.append((label, cells))
    return rows


def _context(comparison: Comparison) -> dict[str, Any]:
    firsts = [comparison.of(policy)[0] for policy in comparison.policies]
    topology = firsts[0].history.topology
    many = len(comparison.seeds) > 1
    return {
        "title": f"{comparison.policies[0]} on {topology.name}",
        "cluster": cluster_line(topology),
        "notes": comparison.notes,
        "bars": "Median over seeds, with the least and the largest." if many else
                "Bars: 95 % of a circular block bootstrap over jobs (one seed). Figures without one are exact sums.",
        "seeds": ", ".join(str(seed) for seed in comparison.seeds),
        "tiles": _tiles(comparison),
        "policies": comparison.policies,
        "rows": table_rows(comparison),
        "gantts": [(trial.policy, charts.gantt(trial)) for trial in firsts],
        "gantt_note": (
            "Rows are nodes in their racks, colours are gangs (paler: part of a node), grey is free."
            if charts.shows_gangs(topology) else
            "Rows are blocks of racks, shade is the share of GPUs held (dark: empty, yellow: full)."
        ),
        "charts": [
            ("Use of GPUs", "Share of all GPUs that jobs hold.", charts.over_time(firsts, "use")),
            (
                "Fragmentation over time",
                "Free GPUs that the usual mix of requests cannot use, as a share of all GPUs (after FGD, ATC'23).",
                charts.over_time(firsts, "fragmentation"),
            ),
            ("Queue", "GPUs that waiting jobs ask for, over all GPUs.", charts.over_time(firsts, "queue")),
            ("Wait", "Share of jobs that waited longer; waits below 1 s are shown at 1 s.", charts.waits(firsts)),
            (
                "Completion time",
                "Mean time from arrival to end, with its confidence bar.",
                charts.bars(comparison, "jct_mean", "seconds"),
            ),
        ],
    }  # fmt: skip


def cluster_line(topology: Topology) -> str:
    """The cluster in one line."""
    counts = [f"{len(topology.domains_by_level[at]):,} {level}s" for at, level in enumerate(topology.levels[:-1])]
    return f"{topology.name}: {int(topology.capacity_NR[:, 0].sum()):,} GPUs, " + ", ".join(reversed(counts))


def _tiles(comparison: Comparison) -> list[tuple[str, str]]:
    shown = ("utilisation", "jct_mean", "wait_p99", "fragmentation", "cross_rack_gangs")
    first = comparison.policies[0]
    tiles = [(_ROWS[name][0], _told(comparison.value(first, name), _ROWS[name][1])) for name in shown]
    if len(comparison.policies) > 1:
        for name, label in (("jct_mean", "completion time"), ("cross_rack_gangs", "cross-rack gangs")):
            ratios = sorted(comparison.ratios_to_best(name))
            tiles.append((f"{label} / best rival's", f"{ratios[len(ratios) // 2]:.2f}"))
    return tiles


def _told(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    if unit == "number":
        return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
    for seconds, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * seconds:
            return f"{value / seconds:.1f} {name}"
    return f"{value:.1f} s"
