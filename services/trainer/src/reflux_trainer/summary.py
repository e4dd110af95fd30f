"""summary.json of a run, from its events: what docs/metrics.md promises. Pure, apart from writing the file."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_trainer.figures import OUTCOMES
from reflux_trainer.queue.ledger import Audit
from reflux_trainer.records import RunRecord

Events = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the last attempt knows beside the events."""

    steps: int
    wall_seconds: float
    phase_seconds: Mapping[str, float]
    peak_rss_bytes: int
    audit: Audit | None
    checkpoint_failures: Sequence[str]


def summarize(record: RunRecord, events: Events, measured: Measured) -> dict[str, Any]:
    """The document; figures that the run did not reach are null."""
    rl = [event for event in events if event["stage"] == "rl"]
    first, last = _ends(events, record.config.rl.steps)
    return {
        "run": record.run,
        "state": record.shown_state,
        "message": record.message,
        "seed": record.config.seed,
        "steps": measured.steps,
        "attempt": record.attempt,
        "reward_after_warmup": first.get("eval/held/reward"),
        "reward_final": last.get("eval/held/reward"),
        "evaluations": {"after_warmup": _sets(first), "final": _sets(last)},
        "wall_seconds": round(measured.wall_seconds, 3),
        "phase_seconds": {name: round(seconds, 3) for name, seconds in measured.phase_seconds.items()},
        "peak_rss_bytes": measured.peak_rss_bytes,
        **_steps(rl),
        "checkpoint_failures": list(measured.checkpoint_failures),
        "ledger": _ledger(measured.audit) if measured.audit else None,
        "config": record.config.model_dump(exclude_none=True),
    }


def _steps(rl: Events) -> dict[str, Any]:
    """What follows from the events of the steps; one that was written after a crash has few figures."""
    times = ("step", "wait_rollout", "train", "sync", "other", "generate", "verify")
    return {
        "trainer_idle": _mean(rl, "trainer_idle"),
        "lag_histogram": _lags(rl),
        "outcomes": {name: _total(rl, f"outcomes/{name}") for name in OUTCOMES},
        "groups": {name: _total(rl, f"groups/{name}") for name in ("trained", "filtered", "unknown", "dead")},
        "step_seconds": {name: _mean(rl, f"time/{name}") for name in times},
        "versions": _versions(rl),
    }


def write(folder: Path, document: dict[str, Any]) -> None:
    """Writes summary.json atomically."""
    partial = folder / "summary.json.partial"
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(folder / "summary.json")


def _ledger(audit: Audit) -> dict[str, Any]:
    states = ("issued", "emitted", "trained", "filtered", "unknown", "dead")
    return {state: audit.counts.get(state, 0) for state in states} | {"violations": audit.violations}


def _ends(events: Events, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    by_step = {event["step"]: event["metrics"] for event in events if event["stage"] == "evaluation"}
    return by_step.get(0, {}), by_step.get(steps, {})


def _sets(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    sets: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        kind, _, rest = name.partition("/")
        if kind == "eval":
            set_name, _, metric = rest.partition("/")
            sets[set_name][metric] = value
    return dict(sets)


def _lags(rl: Events) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for event in rl:
        counts.update(event.get("detail", {}).get("lag", {}))
    return dict(sorted(counts.items(), key=lambda pair: int(pair[0])))


def _versions(rl: Events) -> dict[str, list[list[float]]]:
    series: dict[str, list[list[float]]] = defaultdict(list)
    for event in rl:
        detail = event.get("detail", {})
        for replica, version in detail.get("replicas", {}).items():
            at = detail["sync"]["at"]
            if not series[replica] or series[replica][-1][0] != at:
                series[replica].append([at, version])
    return dict(series)


def _total(rl: Events, name: str) -> int:
    return int(sum(event["metrics"].get(name, 0.0) for event in rl))


def _mean(rl: Events, name: str) -> float | None:
    found = [event["metrics"][name] for event in rl if name in event["metrics"]]
    return sum(found) / len(found) if found else None
