"""Two LoRA runs of different tasks and seeds at the same time on one replica that both share."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from e2e_language_model import write_language_model
from e2e_stack import small_run

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway_pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux.trainer.v1.run_pb2 import Run
from reflux_client import connection

ONE_FOR_ALL = {"engines": 1, "rollout_workers": 1, "shared": "e2e"}


def adapter_run(name, model, seed, **sections):
    fields = {
        "task": {"num_phases": 2, "prompt": "chat"},
        "model": {"path": str(model), "lora_rank": 8 + 8 * seed},
        "warmup": {"steps": 40, "batch_size": 4, "learning_rate": 2e-2},
        "rl": {"steps": 2, "groups_per_step": 2, "samples_per_group": 8, "max_tokens": 20, "max_lag": 0},
        "evaluation": {"prompts": 2, "intermediate_prompts": 2, "surrogate_prompts": 0},
        "fleet": ONE_FOR_ALL,
    }
    return small_run(name, **(fields | sections)) | {"seed": seed}


def steps_of(run):
    events = [json.loads(line) for line in (Path(run.folder) / "events.jsonl").read_text().splitlines()]
    return [event["metrics"] for event in events if event["stage"] == "rl"]


async def models():
    """Models that the gateway has replicas of, and the addresses of those."""
    async with connection.channel("inference-gateway") as channel:
        answer = await InferenceGatewayServiceStub(channel).ListReplicas(gateway_pb.ListReplicasRequest())
    ready = Replica.STATE_READY  # one that was killed is listed as lost for a while
    return {(replica.model_id, replica.grpc_address) for replica in answer.replicas if replica.state == ready}


@pytest.mark.slow
async def test_two_runs_share_a_replica_and_neither_sees_the_others_adapter(harness, tmp_path):
    model = write_language_model(tmp_path / "model")
    first = await harness.create(adapter_run("red", model, 0))
    second = await harness.create(adapter_run("blue", model, 1))
    seen = set()

    async def look():
        while True:
            seen.update(await models())
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    try:
        ended = await asyncio.gather(*(harness.wait_end(run.name) for run in (first, second)))
    finally:
        looking.cancel()
    for run in ended:
        assert run.state == Run.STATE_SUCCEEDED, run.message
        steps = steps_of(run)
        assert [metrics["version"] for metrics in steps] == [41, 42]
        assert max(metrics["logprob_gap_max"] for metrics in steps) <= 1e-4, "drawn by the run's own adapter"
    names = [run.name.removeprefix("runs/") for run in ended]
    served = dict(seen)
    assert {"shared-e2e", *(f"{name}/adapters/run" for name in names)} <= served.keys()
    assert len({served[f"{name}/adapters/run"] for name in names} | {served["shared-e2e"]}) == 1, "one process"
    left = {model_id for model_id, _ in await models()}
    assert not left & {f"{name}/adapters/run" for name in names}, "seats are given back"
    assert "shared-e2e" in left
    with pytest.raises(grpc.aio.AioRpcError, match="the shared fleet e2e serves another model"):
        await harness.create(adapter_run("other", write_language_model(tmp_path / "other"), 0))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "learner", "trainer"])
async def test_a_run_on_a_shared_fleet_goes_on_when_a_process_is_killed(harness, tmp_path_factory, victim):
    model = tmp_path_factory.getbasetemp() / "shared-base"
    if not model.is_dir():
        write_language_model(model)
    fleet = ONE_FOR_ALL | {"shared": "faults"}
    many = {"steps": 4, "groups_per_step": 2, "samples_per_group": 8, "max_tokens": 20, "max_lag": 0}
    run = await harness.create(adapter_run(f"kill-{victim}", model, 1, fleet=fleet, rl=many))
    stepping = await harness.wait_step(run.name, 1)
    if victim == "trainer":
        harness.kill(harness.record.pids["trainer"])
    elif victim == "learner":
        harness.kill(await harness.role_pid(stepping, "learner"))
    else:
        harness.kill(await engine_pid("shared-faults"))
    ended = await harness.wait_end(run.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    steps = steps_of(ended)
    assert [metrics["version"] for metrics in steps] == [41, 42, 43, 44]
    gaps = [metrics["logprob_gap_max"] for metrics in steps if "logprob_gap_max" in metrics]
    assert len(gaps) >= 3, "a step whose trainer was killed before it wrote the figures has none"
    assert max(gaps) <= 1e-4
    assert not any(model_id.startswith(ended.name.removeprefix("runs/")) for model_id, _ in await models())


async def engine_pid(display_name):
    """Process of the engine of a standing job."""
    async with connection.channel("scheduler") as channel:
        for job in (await SchedulerServiceStub(channel).ListJobs(scheduler_pb.ListJobsRequest())).jobs:
            if job.display_name == display_name:
                return next(member.pid for member in job.members if member.pid)
    raise AssertionError(f"no job is called {display_name}")
