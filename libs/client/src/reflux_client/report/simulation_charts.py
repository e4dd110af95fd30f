"""Charts of a simulation's report, each an SVG string of its own: who holds which rack when, and figures over time."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reflux_placement.simulate.compare import Comparison, Trial
from reflux_placement.simulate.figures import wait_seconds
from reflux_placement.simulate.jobs import window
from reflux_placement.simulate.spans import block_position, rack_position
from reflux_placement.topology import Topology

_WIDTH = 9.4
_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
_BINS = 900
_MAX_NODE_ROWS = 1_500
_MAX_LABELS = 24
_SHOWN_WAIT_FLOOR = 1.0
_HOUR = 3600.0

mpl.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


@dataclass(frozen=True)
class _Clock:
    """The time axis: seconds of the simulation to hours or days since the window's start."""

    start: float
    end: float

    @property
    def unit(self) -> tuple[str, float]:
        return ("days", 24 * _HOUR) if self.end - self.start > 4 * 24 * _HOUR else ("hours", _HOUR)

    def shown(self, at: float) -> float:
        return (at - self.start) / self.unit[1]

    @property
    def label(self) -> str:
        return f"{self.unit[0]} since the end of the warm-up"


def _clock(trial: Trial) -> _Clock:
    """The window, and a quarter of it for what still runs down."""
    start, end = window([record.job for record in trial.history.records])
    last = max((record.ended_at or 0.0 for record in trial.history.done), default=end)
    return _Clock(start, max(start + 1.0, min(last, end + (end - start) / 4)))


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", dpi=110, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def shows_gangs(topology: Topology) -> bool:
    """Whether the Gantt has a row per node with a colour per gang; a larger cluster gets a row per block and shades."""
    return topology.num_nodes <= _MAX_NODE_ROWS


def gantt(trial: Trial) -> str:
    """Who held what: rows are nodes in their racks and colours are gangs, or rows are blocks and shade is use."""
    topology, clock = trial.history.topology, _clock(trial)
    if shows_gangs(topology):
        position = rack_position(topology)
        image, rows = _gang_image(trial, clock), topology.num_nodes
    else:
        position = block_position(topology) or rack_position(topology)
        image, rows = _use_image(trial, clock, position), len(topology.domains_by_level[position])
    figure, axes = _axes(min(9.0, max(2.6, 0.9 + rows * (0.006 if shows_gangs(topology) else 0.03))))
    extent = (0.0, clock.shown(clock.end), float(rows), 0.0)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    _label_rows(axes, topology, position, by_node=shows_gangs(topology))
    axes.axvline(clock.shown(window([r.job for r in trial.history.records])[1]), color="black", lw=0.8, ls="--")
    axes.set(xlabel=f"{clock.label} (dashed: last arrival)")
    return _svg(figure)


def _label_rows(axes: Axes, topology: Topology, position: int, *, by_node: bool) -> None:
    domains = topology.domains_by_level[position]
    every = -(-len(domains) // _MAX_LABELS)
    shown = range(0, len(domains), every)
    edges = [domain.start if by_node else index for index, domain in enumerate(domains)]
    ends = [domain.stop if by_node else index + 1 for index, domain in enumerate(domains)]
    axes.set_yticks([(edges[at] + ends[at]) / 2 for at in shown], [domains[at].path[-1] for at in shown], fontsize=7)
    if by_node and len(domains) <= 80:
        for edge in edges[1:]:
            axes.axhline(edge, color="white", lw=0.6)


def _gang_image(trial: Trial, clock: _Clock) -> NDArray[np.float64]:
    """RGB (nodes, bins): each gang has a colour, paler where it holds only a part of the node's GPUs."""
    topology = trial.history.topology
    image = np.full((topology.num_nodes, _BINS, 3), 0.955)
    palette = np.array(colormaps["tab20"].colors)[:, :3]  # pyright: ignore[reportAttributeAccessIssue]
    capacity_N = np.maximum(topology.capacity_NR[:, 0], 1)
    for number, record in enumerate(trial.history.records):
        color = palette[(number * 7) % len(palette)]
        for stay in record.stays:
            first, last = _bins(clock, stay.start, stay.end)
            if last <= first:
                continue
            nodes, counts = np.unique(stay.node_M, return_counts=True)
            share_N = np.clip(counts * stay.gpus / max(1, len(stay.node_M)) / capacity_N[nodes], 0.25, 1.0)
            shade = 1.0 - share_N[:, None] * (1.0 - color[None, :])
            image[nodes, first:last] = shade[:, None, :]
    return image


def _use_image(trial: Trial, clock: _Clock, position: int) -> NDArray[np.float64]:
    """RGB (domains, bins): share of the domain's GPUs that are held."""
    topology = trial.history.topology
    held = np.zeros((len(topology.domains_by_level[position]), _BINS + 1))
    for record in trial.history.records:
        for stay in record.stays:
            first, last = _bins(clock, stay.start, stay.end)
            if last <= first or not stay.gpus:
                continue
            gpus_M = np.array([mask.bit_count() for mask in stay.gpus_M.tolist()])
            domain_M = topology.domain_LN[position, stay.node_M]
            np.add.at(held[:, first], domain_M, gpus_M)
            np.add.at(held[:, last], domain_M, -gpus_M)
    total = np.maximum(topology.sums(topology.capacity_NR[:, 0], position), 1)
    share = np.cumsum(held[:, :-1], axis=1) / total[:, None]
    return colormaps["viridis"](np.clip(share, 0, 1))[:, :, :3]


def _bins(clock: _Clock, start: float, end: float) -> tuple[int, int]:
    """Bins whose middle lies inside a time."""
    width = (clock.end - clock.start) / _BINS
    first = int(np.ceil((start - clock.start) / width - 0.5))
    last = int(np.ceil((end - clock.start) / width - 0.5))
    return min(max(first, 0), _BINS), min(max(last, 0), _BINS)


def over_time(trials: Sequence[Trial], what: str) -> str:
    """One line per policy: "use" (share of GPUs held), "fragmentation" (share of GPUs) or "queue" (GPUs asked for)."""
    figure, axes = _axes(2.6)
    clock = max((_clock(trial) for trial in trials), key=lambda each: each.end)
    total = float(trials[0].history.topology.capacity_NR[:, 0].sum())
    for color, trial in zip(_COLORS, trials, strict=False):
        samples = [sample for sample in trial.history.samples if sample.at <= clock.end]
        values = {
            "use": [sample.used_gpus / total for sample in samples],
            "fragmentation": [sample.fragmented_gpus / total for sample in samples],
            "queue": [sample.pending_gpus / total for sample in samples],
        }[what]
        axes.plot([clock.shown(sample.at) for sample in samples], values, color=color, lw=1.1, label=trial.policy)
    label = {"use": "share of GPUs held", "fragmentation": "share of GPUs", "queue": "waiting GPUs / all GPUs"}[what]
    axes.set(xlabel=clock.label, ylabel=label, xlim=(0, clock.shown(clock.end)))
    axes.set_ylim(bottom=0, top=1.0 if what == "use" else None)
    _legend(axes, len(trials))
    return _svg(figure)


def waits(trials: Sequence[Trial]) -> str:
    """Share of jobs that waited longer than a time, both axes logarithmic: the tail is what hurts."""
    figure, axes = _axes(2.9)
    longest = _SHOWN_WAIT_FLOOR * 10
    if all(not wait_seconds(trial.history.done).any() for trial in trials):
        axes.text(0.5, 0.5, "no job waited", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return _svg(figure)
    for color, trial in zip(_COLORS, trials, strict=False):
        values = np.sort(wait_seconds(trial.history.done))
        if not len(values):
            continue
        longest = max(longest, float(values[-1]))
        longer = 1.0 - np.arange(1, len(values) + 1) / len(values)
        shown = np.maximum(values, _SHOWN_WAIT_FLOOR)
        axes.step(shown, np.maximum(longer, 0.5 / len(values)), where="post", color=color, label=trial.policy, lw=1.2)
    axes.set(xscale="log", yscale="log", xlim=(_SHOWN_WAIT_FLOOR, longest), ylim=(None, 1.0))
    ticks = [(1, "1 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (36_000, "10 h"), (864_000, "10 d")]
    inside = [(at, name) for at, name in ticks if at <= longest]
    axes.set_xticks([at for at, _ in inside], [name for _, name in inside])
    axes.minorticks_off()
    axes.set(xlabel="wait", ylabel="share of jobs that waited longer")
    _legend(axes, len(trials))
    return _svg(figure)


def bars(comparison: Comparison, name: str, label: str) -> str:
    """One figure of every policy with its confidence bar."""
    figure, axes = _axes(0.5 + 0.35 * len(comparison.policies))
    for at, policy in enumerate(comparison.policies):
        value, bar = comparison.value(policy, name), comparison.bar(policy, name)
        axes.barh(at, value, color=_COLORS[at % len(_COLORS)], height=0.6)
        if bar is not None:
            axes.plot([bar.low, bar.high], [at, at], color="black", lw=1.4, marker="|", ms=7)
    axes.set_yticks(range(len(comparison.policies)), comparison.policies)
    axes.invert_yaxis()
    axes.set(xlabel=label)
    return _svg(figure)


def _legend(axes: Axes, count: int) -> None:
    axes.legend(frameon=False, ncols=min(4, count), loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
