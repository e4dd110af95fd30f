"""What a run leaves in its folder, read for people: events, summary, sample transcripts (names: docs/metrics.md)."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reflux_client.connection import ClientError


@dataclass(frozen=True)
class Event:
    """Figures of one training step or evaluation."""

    stage: str
    step: int
    total_steps: int
    at: float
    metrics: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """Everything that the report shows."""

    name: str
    summary: dict[str, Any]
    events: list[Event]
    samples: list[dict[str, Any]]

    def stage(self, name: str) -> list[Event]:
        """Events of one stage by step. Several of one step are merged: parts of an evaluation, or a replay."""
        merged: dict[int, Event] = {}
        for event in self.events:
            if event.stage == name:
                earlier = merged.get(event.step)
                merged[event.step] = replace(event, metrics={**earlier.metrics, **event.metrics}) if earlier else event
        return [merged[step] for step in sorted(merged)]

    def series(self, stage: str, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of one figure, where it was reported."""
        found = [(each.step, each.metrics[metric]) for each in self.stage(stage) if metric in each.metrics]
        return [step for step, _ in found], [value for _, value in found]


def read_run(folder: Path) -> RunRecord:
    """Reads a run folder. Raises `ClientError` naming the file that is missing."""
    path = folder / "summary.json"
    if not path.exists():
        raise ClientError(f"{path} does not exist: the run has not ended, or {folder} is not a run folder")
    events = [Event(**line) for line in _lines(folder / "events.jsonl")]
    samples = _lines(folder / "samples.jsonl")
    return RunRecord(name=folder.name, summary=json.loads(path.read_text()), events=events, samples=samples)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(line) for line in file if line.endswith("\n")]
