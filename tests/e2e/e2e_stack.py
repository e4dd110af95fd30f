"""What the end-to-end tests do with a stack: start small runs, wait for steps, kill processes, read ledgers."""

import asyncio
import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import grpc

from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux.trainer.v1 import trainer_service_pb2 as trainer_pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection
from reflux_runs.load import load_document
from reflux_runs.translate import to_message

HANG_SECONDS = 150.0
LEAN = {"engines": 1, "rollout_workers": 1}
"""Fleet of a run that is not about its fleet: fewer processes to wait for."""
ENDED = (Run.STATE_SUCCEEDED, Run.STATE_FAILED, Run.STATE_CANCELLED)


def small_run(name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run that goes through every part in seconds; `sections` override single keys."""
    document: dict[str, Any] = {
        "name": name,
        "task": {"mixture_fraction": 0.0, "num_phases": 8},
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 128},
        "warmup": {"steps": 60, "batch_size": 32, "learning_rate": 8e-3, "mixture_fraction": 0.0},
        "rl": {"steps": 6, "groups_per_step": 4, "samples_per_group": 4, "ramp_steps": 2, "no_progress_seconds": 60.0},
        "evaluation": {
            "prompts": 12, "every_steps": 0, "intermediate_prompts": 4, "surrogate_prompts": 4, "full_prompts": 0,
        },
        "checkpoint": {"every_steps": 2},
        "fleet": {"engines": 2, "rollout_workers": 2, "transport": "shm"},
    }  # fmt: skip
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    return document


class Harness:
    """A running stack."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def record(self) -> connection.StackRecord:
        """The stack's record as it is now."""
        record = connection.read_record(self.folder)
        assert record is not None, "the stack has ended: " + (self.folder / "devstack.log").read_text()[-2000:]
        return record

    async def create(self, document: dict[str, Any], resume_run: str = "") -> Run:
        """Creates a run."""
        config = to_message(load_document(document))
        request = trainer_pb.CreateRunRequest(request_id=str(uuid.uuid4()), config=config, resume_run=resume_run)
        async with connection.channel("trainer") as channel:
            return (await TrainerServiceStub(channel).CreateRun(request)).run

    async def get(self, name: str) -> Run:
        """The run as it is now; a trainer that restarts is waited for."""
        end = time.monotonic() + HANG_SECONDS
        async with connection.channel("trainer") as channel:
            while True:
                try:
                    return (await TrainerServiceStub(channel).GetRun(trainer_pb.GetRunRequest(name=name))).run
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                        raise
                await asyncio.sleep(0.2)

    async def wait_step(self, name: str, step: int) -> Run:
        """Waits until `step` training steps are done."""
        return await self._wait(name, lambda run: run.step >= step or run.state in ENDED, f"step {step}")

    async def wait_end(self, name: str) -> Run:
        """Waits until the run has ended."""
        return await self._wait(name, lambda run: run.state in ENDED, "the end")

    async def _wait(self, name: str, done: Any, what: str) -> Run:
        end = time.monotonic() + HANG_SECONDS
        while True:
            run = await self.get(name)
            if done(run):
                return run
            assert time.monotonic() < end, f"{name} did not reach {what}: step {run.step}, {run.message}"
            await asyncio.sleep(0.1)

    async def role_pid(self, run: Run, role: str, rank: int = 0) -> int:
        """Process id of a running member of the run's job."""
        end = time.monotonic() + 30
        async with connection.channel("scheduler") as channel:
            while time.monotonic() < end:
                job = (await SchedulerServiceStub(channel).GetJob(scheduler_pb.GetJobRequest(name=run.job))).job
                for member in job.members:
                    if member.role_id.endswith(f"/{role}/{rank}") and member.pid:
                        return member.pid
                await asyncio.sleep(0.1)
        raise AssertionError(f"{run.job} has no running {role}/{rank}")

    def kill(self, pid: int) -> None:
        """kill -9."""
        os.kill(pid, signal.SIGKILL)

    def figures(self, run: Run, name: str) -> list[float]:
        """A figure of the steps of a run's RL stage, where an event has it."""
        lines = (Path(run.folder) / "events.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["stage"] == "rl"]
        return [event["metrics"][name] for event in events if name in event["metrics"]]

    def summary(self, run: Run) -> dict[str, Any]:
        """summary.json of an ended run."""
        return json.loads((Path(run.folder) / "summary.json").read_text())
