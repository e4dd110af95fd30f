"""A local stack for a benchmark, and runs on it from the first request to their last event."""

import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.trainer.v1 import trainer_service_pb2 as pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection, stack
from reflux_runs.load import load_document
from reflux_runs.translate import to_message

TINY: dict[str, dict[str, Any]] = {
    "task": {"mixture_fraction": 0.0, "num_phases": 8},
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64},
    "evaluation": {
        "prompts": 1, "every_steps": 0, "intermediate_prompts": 1, "surrogate_prompts": 0, "full_prompts": 0,
    },
    "checkpoint": {"every_steps": 0},
    "fleet": {"engines": 1, "rollout_workers": 1},
}  # fmt: skip
"""A model and a task so small that the platform is what is measured."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended well."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    """Events of the stage `rl`, in order."""

    def figures(self, name: str) -> list[float]:
        """One figure of every step that has it."""
        return [event["metrics"][name] for event in self.steps if name in event["metrics"]]


@contextmanager
def local_stack() -> Iterator[Path]:
    """A stack in a folder of its own; ends with the block, or with this process."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="reflux-bench-") as name:
        folder = Path(name)
        os.environ |= {"REFLUX_STATE_DIR": name, "REFLUX_TRAINER_RUNS_DIR": str(folder / "runs")}
        try:
            stack.start(folder, die_with_parent=True)
            yield folder
        finally:
            stack.stop(folder)
            os.environ.clear()
            os.environ.update(before)


def document(name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A run file of the tiny model; `sections` override single keys."""
    found: dict[str, Any] = {"name": name, **{key: dict(value) for key, value in TINY.items()}}
    for section, values in sections.items():
        found[section] = {**found.get(section, {}), **values}
    return found


async def finish(run_file: Mapping[str, Any], limit_seconds: float) -> Finished:
    """Creates a run and waits for its end. Raises `RuntimeError` with its message when it fails."""
    request = pb.CreateRunRequest(request_id=str(uuid.uuid4()), config=to_message(load_document(dict(run_file))))
    end = time.monotonic() + limit_seconds
    async with connection.channel("trainer") as channel:
        stub = TrainerServiceStub(channel)
        run = (await stub.CreateRun(request, timeout=60)).run
        while run.state not in (Run.STATE_SUCCEEDED, Run.STATE_FAILED, Run.STATE_CANCELLED):
            if time.monotonic() > end:
                raise RuntimeError(f"{run.name} did not end within {limit_seconds:.0f} s: step {run.step}")
            await asyncio.sleep(0.5)
            run = (await stub.GetRun(pb.GetRunRequest(name=run.name), timeout=30)).run
    if run.state != Run.STATE_SUCCEEDED:
        raise RuntimeError(f"{run.name}: {run.message}")
    folder = Path(run.folder)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return Finished(
        json.loads((folder / "summary.json").read_text()), [event for event in events if event["stage"] == "rl"]
    )
