"""Prometheus metrics of the ladders; names are part of the contract with dashboards."""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from reflux_sandbox.ladder.runs import RunState
from reflux_sandbox.ladder.state import Corrected, Event, Released, Unresolved

CREATED = Counter("reflux_sandbox_ladders_total", "Groups that were put on the ladder")
OPEN = Gauge("reflux_sandbox_ladders_open", "Groups that are not settled")
RELEASED = Counter("reflux_sandbox_ladder_releases_total", "Groups released, by rung", ["rung"])
CORRECTED = Counter("reflux_sandbox_ladder_corrections_total", "Full rewards that came after the release")
UNRESOLVED = Counter("reflux_sandbox_ladder_unresolved_total", "Full verifications without a reward", ["outcome"])
SETTLED = Counter("reflux_sandbox_ladders_settled_total", "Groups of which nothing will change any more")
_RUN = ["run"]
TRUSTED = Gauge("reflux_sandbox_ladder_trusted", "1 while the cheap rung releases groups", _RUN)
CORRELATION = Gauge("reflux_sandbox_ladder_rank_correlation", "Spearman's, cheap against full", _RUN)
BIAS = Gauge("reflux_sandbox_ladder_bias", "Mean of cheap minus full reward", _RUN)
COVERAGE = Gauge("reflux_sandbox_ladder_coverage", "Share of released samples with a full grade", _RUN)
CPU = Gauge("reflux_sandbox_ladder_cpu_seconds", "CPU seconds of the full rung", _RUN)
SAVED = Gauge("reflux_sandbox_ladder_cpu_seconds_saved", "Forecast CPU seconds of skipped verifications", _RUN)
ERROR = Gauge("reflux_sandbox_ladder_advantage_error", "Mean error of advantages on audited groups", _RUN)


def tell(events: Sequence[Event], settled: bool) -> None:
    """Counts what happened to a group."""
    for event in events:
        if isinstance(event, Released):
            RELEASED.labels(event.rung).inc()
        elif isinstance(event, Corrected):
            CORRECTED.inc()
        elif isinstance(event, Unresolved):
            UNRESOLVED.labels(event.grade.outcome).inc()
    SETTLED.inc(settled)


def show(run: str, state: RunState) -> None:
    """Shows the calibration of a run."""
    known, counters = state.figures, state.row.counters
    audited = counters.get("audited_groups", 0.0)
    for gauge, value in (
        (TRUSTED, float(state.row.trusted)),
        (CORRELATION, known.rank_correlation),
        (BIAS, known.bias),
        (COVERAGE, known.coverage),
        (CPU, counters.get("cpu_seconds", 0.0)),
        (SAVED, counters.get("cpu_seconds_saved", 0.0)),
        (ERROR, counters.get("advantage_error", 0.0) / audited if audited else 0.0),
    ):
        gauge.labels(run).set(value)
