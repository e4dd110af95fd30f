"""The report of a run: one self-contained HTML page with figures, charts and errors."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
import matplotlib as mpl
from figures import SHARES, TIMES, Summary, by_kind, flat
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sending import Outcome

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
_BAD = "#c14c8a"
_COLUMNS = (*(f"p{share:g}" for share in SHARES), "max")

mpl.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def write_report(path: Path, outcomes: Sequence[Outcome], seconds: float, facts: dict[str, str]) -> None:
    """Writes the page; `facts` are shown as they are (address, rate, mix). It loads nothing from elsewhere."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    summaries, run = by_kind(outcomes), flat(outcomes, seconds)
    page = environment.from_string(_TEMPLATE.read_text()).render(
        facts=facts,
        tiles=_tiles(run),
        columns=_COLUMNS,
        tables=[(label, _rows(summaries, name)) for name, (label, _) in TIMES.items()],
        summaries=summaries,
        errors=summaries[0].errors,
        charts=[
            ("Answers over time", "Each dot is a request at the time when it was due.", _svg(_over_time, outcomes)),
            ("Share of answers that took longer", "Both axes are logarithmic.", _svg(_tails, outcomes)),
            ("Requests and failures", "Per second, by the time when they were due.", _svg(_per_second, outcomes)),
        ],
    )
    path.write_text(page)


def _tiles(run: dict[str, float]) -> list[tuple[str, str]]:
    tiles = [("requests", f"{run['requests']:.0f}"), ("failed", f"{run['failed']:.0f}")]
    tiles += [
        ("requests per second", f"{run['requests_per_s']:.1f}"),
        ("tokens per second", f"{run['tokens_per_s']:.0f}"),
    ]
    for key, label in (("first_token_p99_ms", "first token, p99"), ("total_p99_ms", "whole answer, p99")):
        if key in run:
            tiles.append((label, f"{run[key]:.0f} ms"))
    return [*tiles, ("generator late, p99", f"{run['generator_late_p99_ms']:.1f} ms")]


def _rows(summaries: Sequence[Summary], name: str) -> list[tuple[str, list[str]]]:
    """Milliseconds of one figure, a row for each summary that has it."""
    found = [(each.name, each.times[name]) for each in summaries if name in each.times]
    return [(kind, [f"{times[column] * 1e3:.1f}" for column in _COLUMNS]) for kind, times in found]


def _over_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    whole, failed = [one for one in outcomes if not one.error], [one for one in outcomes if one.error]
    axes.plot(
        [one.at for one in whole], [one.total for one in whole], ".", color=_COLORS[0], markersize=3, label="whole"
    )
    axes.plot([one.at for one in failed], [one.total for one in failed], "x", color=_BAD, markersize=4, label="failed")
    axes.set(xlabel="seconds from the start", ylabel="seconds until the answer")
    axes.legend(frameon=False)


def _tails(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for color, (label, pick) in zip(_COLORS, TIMES.values(), strict=False):
        if ordered := sorted(value for one in outcomes if (value := pick(one))):
            left = [1 - place / len(ordered) for place in range(len(ordered))]
            axes.step([value * 1e3 for value in ordered], left, where="post", color=color, label=label)
    axes.set(xlabel="milliseconds", ylabel="share", xscale="log", yscale="log")
    axes.legend(frameon=False)


def _per_second(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for color, label, chosen in (
        (_COLORS[0], "requests", list(outcomes)),
        (_BAD, "failed", [one for one in outcomes if one.error]),
    ):
        counts = Counter(int(one.at) for one in chosen)
        if counts:
            seconds = range(max(counts) + 1)
            axes.step(seconds, [counts[second] for second in seconds], where="post", color=color, label=label)
    axes.set(xlabel="seconds from the start", ylabel="per second", ylim=(0, None))
    axes.legend(frameon=False)


def _svg(draw: Callable[[Axes, Sequence[Outcome]], None], outcomes: Sequence[Outcome]) -> str:
    figure = Figure(figsize=(9.4, 2.9), layout="constrained")
    draw(figure.subplots(), outcomes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
