"""report.html of one run: one self-contained file with charts, figures and transcripts; reward.svg is its curve."""

from pathlib import Path
from typing import Any

import jinja2

from reflux_client.report import charts
from reflux_client.report.records import RunRecord, read_run

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_SAMPLES = 10


def write_report(folder: Path) -> Path:
    """Writes `report.html` and `reward.svg` into the run folder; returns the path of the first."""
    run = read_run(folder)
    (folder / "reward.svg").write_text(charts.reward_curve(run))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(_TEMPLATE.read_text()).render(_context(run))
    path = folder / "report.html"
    path.write_text(text)
    return path


def _context(run: RunRecord) -> dict[str, Any]:
    summary = run.summary
    return {
        "run": run.name,
        "state": summary.get("state", ""),
        "message": summary.get("message", ""),
        "tiles": _tiles(summary),
        "charts": [
            (
                "Reward and pass rate",
                "Thin: each step. Thick: mean over 9 steps. Dots: held-out prompts.",
                charts.reward_curve(run),
            ),
            ("Where each step's time went", "Wall seconds of the trainer's loop, stacked.", charts.time_stack(run)),
            ("Lag", "Training step minus the weight version that generated the sample.", charts.lag_histogram(run)),
            (
                "Verification outcomes",
                "Only scored and invalid are rewards; the others are unknown.",
                charts.outcomes(run),
            ),
            ("Weight versions", "Version that each replica served.", charts.versions(run)),
        ],
        "evaluations": _evaluations(summary),
        "samples": [_sample(each) for each in _chosen(run.samples)],
    }


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = summary.get("reward_after_warmup"), summary.get("reward_final")
    tiles = [("held-out reward after warm-up", _number(before)), ("held-out reward, final", _number(after))]
    if before is not None and after is not None:
        tiles.append(("gain", f"{after - before:+.3f}"))
    tiles += [
        ("steps", str(summary.get("steps", "-"))),
        ("wall time", f"{summary.get('wall_seconds', 0):.0f} s"),
        ("peak memory, all processes", f"{summary.get('peak_rss_bytes', 0) / 2**30:.2f} GiB"),
        ("seed", str(summary.get("seed", "-"))),
    ]
    return tiles


def _evaluations(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows (set, figure, after warm-up, final)."""
    rows = []
    ends = summary.get("evaluations", {})
    before, after = ends.get("after_warmup", {}), ends.get("final", {})
    for name in after:
        for figure in after[name]:
            first = before.get(name, {}).get(figure)
            rows.append(
                (name.replace("_", " "), figure.replace("_", " "), _number(first), _number(after[name][figure]))
            )
    return rows


def _chosen(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ten transcripts spread over the run."""
    if len(samples) <= _SAMPLES:
        return samples
    return [samples[round(place * (len(samples) - 1) / (_SAMPLES - 1))] for place in range(_SAMPLES)]


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"reward": _number(sample.get("reward")), "svg": charts.pattern(sample["peaks"])}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
