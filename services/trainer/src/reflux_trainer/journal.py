"""What a run leaves behind: events for watchers (Redis) and for later (files in the run folder)."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from reflux_trainer.queue.client import RedisClient
from reflux_trainer.queue.keys import RunKeys

MAX_EVENTS = 20_000
"""Events that the stream of a run keeps, about."""


@dataclass(frozen=True)
class Event:
    """Figures of one step or evaluation; a mere change of state has no stage."""

    stage: str = ""
    step: int = 0
    total_steps: int = 0
    at: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        return cls(**json.loads(raw))


class Journal:
    """Writer of one run's events and transcripts. Lines are flushed one by one; a half line at the end is ignored."""

    def __init__(self, redis: RedisClient, run: str, folder: Path) -> None:
        self._redis = redis
        self._key = RunKeys(run).events
        self._folder = folder

    async def write(
        self, stage: str, step: int, total_steps: int, metrics: dict[str, float], detail: dict[str, Any] | None = None
    ) -> None:
        """One event; `detail` goes to the file only."""
        finite = {name: value if math.isfinite(value) else -1.0 for name, value in metrics.items()}
        event = Event(stage, step, total_steps, time.time(), finite)
        await self._redis.xadd(self._key, {"e": event.to_json()}, maxlen=MAX_EVENTS, approximate=True)
        self._append("events.jsonl", vars(event) | ({"detail": detail} if detail else {}))

    def sample(self, transcript: dict[str, Any]) -> None:
        """One transcript for people."""
        self._append("samples.jsonl", transcript)

    def events(self) -> list[dict[str, Any]]:
        """All events of the run so far, one per step or evaluation; figures that came later win."""
        merged: dict[tuple[str, int], dict[str, Any]] = {}
        for line in self._lines("events.jsonl"):
            known = merged.get((line["stage"], line["step"]), {})
            metrics = known.get("metrics", {}) | line["metrics"]
            merged[line["stage"], line["step"]] = known | line | {"metrics": metrics}
        return sorted(merged.values(), key=lambda line: line["at"])

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        if not path.is_file():
            return []
        lines = []
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # torn by a crash
        return lines

    def _append(self, name: str, document: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(document, separators=(",", ":")) + "\n")
