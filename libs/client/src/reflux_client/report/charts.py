"""The report's charts, each an SVG string of its own."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reflux_client.report.records import RunRecord

_WIDTH, _HEIGHT = 7.2, 2.9
_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774", "#cb912f")
_TIMES = ("wait_rollout", "train", "sync", "other")
_OUTCOMES = ("scored", "invalid", "timeout", "infra_error", "cancelled")

mpl.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def _figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def reward_curve(run: RunRecord) -> str:
    """Training reward and pass rate per step, with the held-out evaluations on top."""
    figure, axes = _figure(3.3)
    for color, (metric, label) in zip(
        _COLORS, (("reward/mean", "reward, sampled"), ("reward/pass_rate", "pass rate")), strict=False
    ):
        steps, values = run.series("rl", metric)
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, _smooth(values), color=color, label=label)
    steps, values = run.series("evaluation", "eval/held/reward")
    axes.plot(steps, values, "o-", color=_COLORS[2], label="held-out reward, greedy (95 %)")
    bounded, low = run.series("evaluation", "eval/held/reward_low")
    axes.vlines(bounded, low, run.series("evaluation", "eval/held/reward_high")[1], color=_COLORS[2], linewidth=1.2)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1))
    axes.legend(frameon=False, ncols=3, loc="upper left")
    return _svg(figure)


def time_stack(run: RunRecord) -> str:
    """Where each step's wall time went."""
    figure, axes = _figure()
    events = run.stage("rl")
    series = [[each.metrics.get(f"time/{name}", 0.0) for each in events] for name in _TIMES]
    axes.stackplot(
        [each.step for each in events], series, labels=[name.replace("_", " ") for name in _TIMES], colors=_COLORS
    )
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(frameon=False, ncols=4, loc="upper right")
    return _svg(figure)


def lag_histogram(run: RunRecord) -> str:
    """How many versions old the trained samples were."""
    figure, axes = _figure(2.4)
    counts = {int(lag): count for lag, count in run.summary.get("lag_histogram", {}).items()}
    axes.bar([str(lag) for lag in sorted(counts)], [counts[lag] for lag in sorted(counts)], color=_COLORS[0], width=0.6)
    axes.set(xlabel="lag (versions)", ylabel="samples")
    return _svg(figure)


def outcomes(run: RunRecord) -> str:
    """Verification outcomes by type, per step."""
    figure, axes = _figure(2.4)
    events = run.stage("rl")
    bottom = [0.0] * len(events)
    for color, name in zip(_COLORS, _OUTCOMES, strict=False):
        values = [each.metrics.get(f"outcomes/{name}", 0.0) for each in events]
        if any(values):
            axes.bar(
                [each.step for each in events],
                values,
                bottom=bottom,
                width=1.0,
                color=color,
                label=name.replace("_", " "),
            )
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set(xlabel="step", ylabel="samples")
    if events:
        axes.legend(frameon=False, ncols=5, loc="upper right")
    return _svg(figure)


def versions(run: RunRecord) -> str:
    """Weight version of each replica over time."""
    figure, axes = _figure(2.4)
    traces: dict[str, list[Sequence[float]]] = run.summary.get("versions", {})
    origin = min((points[0][0] for points in traces.values() if points), default=0.0)
    for color, (replica, points) in zip(_COLORS, sorted(traces.items()), strict=False):
        axes.step(
            [at - origin for at, _ in points],
            [version for _, version in points],
            where="post",
            color=color,
            label=replica,
        )
    axes.set(xlabel="seconds", ylabel="weight version")
    if traces:
        axes.legend(frameon=False, loc="upper left")
    return _svg(figure)


def pattern(peaks: dict[str, Any]) -> str:
    """The measured peaks of one sample, as the model saw them."""
    figure, axes = _figure(1.5)
    axes.vlines(peaks["two_theta"], 0, peaks["intensity"], color=_COLORS[0], linewidth=1.4)
    axes.set(xlabel="2 theta (degrees, Cu K-alpha)", ylabel="intensity", xlim=(10, 90), ylim=(0, 1.05))
    return _svg(figure)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    smoothed = []
    for at in range(len(values)):
        around = values[max(0, at - window // 2) : at + window // 2 + 1]
        smoothed.append(sum(around) / len(around))
    return smoothed
