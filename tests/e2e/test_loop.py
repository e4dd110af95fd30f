"""The whole loop through all services: small runs on the real stack."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from e2e_stack import HANG_SECONDS, LEAN, small_run

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux.checkpoint.v1.checkpoint_pb2 import Checkpoint
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux.trainer.v1 import trainer_service_pb2 as trainer_pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker_pb
from reflux.weight_broker.v1.weight_broker_service_pb2_grpc import WeightBrokerServiceStub
from reflux_client import connection, tracing
from reflux_client.report.build import write_report
from reflux_kit import auth
from reflux_runs.load import dump_text, load_document


@pytest.fixture(scope="module")
def loop(harness):
    """A run over UCX that has ended, for all who look at what it left."""
    # A seed of its own: grades of equal answers to equal prompts come from the cache, without an attempt.
    return asyncio.run(run_to_the_end(harness, small_run("loop-ucx", fleet={"transport": "ucx"}) | {"seed": 11}))


async def run_to_the_end(harness, document):
    created = await harness.create(document)
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    return ended


async def test_a_small_run_goes_from_prompt_to_report(harness, loop):
    check_loop(harness, loop, max_lag=1)
    await check_paths(loop, "ucx")
    text = write_report(Path(loop.folder)).read_text()
    assert text.count("<svg") >= 6


async def test_a_synchronous_run_over_shared_memory_has_no_lag(harness):
    ended = await run_to_the_end(harness, small_run("loop-shm", fleet={"transport": "shm"}, rl={"max_lag": 0}))
    check_loop(harness, ended, max_lag=0)
    await check_paths(ended, "shm")


def check_loop(harness, ended, max_lag):
    summary = harness.summary(ended)
    assert summary["steps"] == 6
    assert summary["ledger"]["violations"] == []
    assert set(summary["lag_histogram"]) <= {str(lag) for lag in range(max_lag + 1)}
    assert max_lag == 0 or summary["lag_histogram"]["1"] > 0, "nothing was generated while the trainer trained"
    assert sum(summary["lag_histogram"].values()) == 6 * 4 * 4
    assert summary["peak_rss_bytes"] > 0
    assert len(summary["versions"]) == 2


async def check_paths(ended, transport):
    """The learner's self-test, the replicas' too, and the path from each of them to whom it read from."""
    run = ended.name.removeprefix("runs/")
    async with connection.channel("weight-broker") as channel:
        answer = await WeightBrokerServiceStub(channel).ListPaths(broker_pb.ListPathsRequest())
    listed = {report.process: report.paths for report in answer.processes if run in report.process}
    assert len(listed) == 3, sorted(listed)
    for process, paths in listed.items():
        assert [path.transport for path in paths if path.chosen and not path.peer] == [transport]
        peers = {path.transport for path in paths if path.peer}
        assert peers == (set() if process == f"learners/{run}" else {transport})


async def test_a_sample_can_be_traced_from_prompt_to_optimizer_step(harness, loop):
    run_id = loop.name.removeprefix("runs/")
    samples = [json.loads(line) for line in (Path(loop.folder) / "samples.jsonl").read_text().splitlines()]
    trained = next(sample["sample"] for sample in samples if sample["stage"] == "rl")
    prompt = tracing.parse_sample_id(trained)[1]
    steps: list[tracing.SpanNode] = []
    for _ in range(50):  # exporters write every half second
        (root,) = tracing.find_tree(harness.folder / "traces", run_id, prompt)
        parts = {child.record["name"]: child for child in root.children}
        steps = parts["train"].children if "train" in parts else []
        if steps:
            break
        await asyncio.sleep(0.1)
    assert [step.record["name"] for step in steps] == ["optimizer step"]
    assert len(parts["train"].record["attributes"]["reflux.advantages"]) == 4
    assert {"gateway.generate_group", "engine.generate"} <= set(_names(parts["generate"]))
    assert "sandbox.attempt" in _names(parts["verify"])
    assert all(span.record["end_ns"] >= span.record["start_ns"] > 0 for span in [*parts.values(), *steps])


def _names(node: tracing.SpanNode) -> list[str]:
    return [node.record["name"], *(name for child in node.children for name in _names(child))]


async def test_a_run_can_be_created_over_http_answers_over_the_openai_api_pauses_resumes_and_cancels(harness):
    base = f"http://{harness.record.http['trainer']}"
    headers = {"Authorization": f"Bearer {auth.mint(connection.settings().stack_secret, 'researcher')}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        config = small_run("http", rl={"steps": 400}, fleet=LEAN)
        async with session.post(f"{base}/v1/runs", json={"config": config}) as response:
            assert response.status in (200, 201), await response.text()
            created = await response.json()
        too_large = config | {"model": {"hidden_size": 1 << 17, "num_layers": 80}}
        async with session.post(f"{base}/v1/runs", json={"config": too_large}) as response:
            assert (response.status, (await response.json())["error"]["field"]) == (400, "model.hidden_size")
        name = created["name"]
        await harness.wait_step(name, 1)
        await check_openai_api(session, harness, name.removeprefix("runs/"))
        async with connection.channel("trainer") as channel:
            stub = TrainerServiceStub(channel)
            await stub.PauseRun(trainer_pb.PauseRunRequest(name=name))
            paused = await harness.get(name)
            assert paused.state == Run.STATE_PAUSED
            await stub.ResumeRun(trainer_pb.ResumeRunRequest(name=name))
            await harness.wait_step(name, paused.step + 2)
            await stub.CancelRun(trainer_pb.CancelRunRequest(name=name))
        assert (await harness.wait_end(name)).state == Run.STATE_CANCELLED


async def check_openai_api(session, harness, run):
    base = f"http://{harness.record.http['inference-gateway']}/v1"
    async with session.get(f"{base}/models") as response:
        models = [model["id"] for model in (await response.json())["data"]]
    (model,) = [each for each in models if run in each]
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "n": 2, "logprobs": 1, "seed": 3}
    async with session.post(f"{base}/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["prompt_tokens"] == 3


async def test_the_command_runs_resumes_from_a_committed_checkpoint_and_traces(harness, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(dump_text(load_document(small_run("by-command", rl={"steps": 400}, fleet=LEAN))))
    started = await asyncio.to_thread(reflux, "run", str(path), "--detach")
    assert started.returncode == 0, started.stderr
    run_id = started.stdout.split()[1]
    await harness.wait_step(f"runs/{run_id}", 4)
    assert (await asyncio.to_thread(reflux, "cancel", run_id)).returncode == 0
    cancelled = await harness.wait_end(f"runs/{run_id}")
    latest = await latest_checkpoint(run_id)
    assert latest.state == Checkpoint.STATE_COMMITTED
    assert 2 <= latest.cursor.step <= cancelled.step
    steps = cancelled.step + 4
    path.write_text(dump_text(load_document(small_run("by-command", rl={"steps": steps}, fleet=LEAN))))
    resumed = await asyncio.to_thread(reflux, "run", str(path), "--resume", run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "succeeded" in resumed.stdout
    assert "report.html" in resumed.stdout
    ended = await harness.get(f"runs/{run_id}")
    summary = harness.summary(ended)
    assert (summary["steps"], summary["ledger"]["violations"]) == (steps, [])
    traced = await asyncio.to_thread(reflux, "trace", f"{run_id}/0/1")
    assert "generate" in traced.stdout
    for command in ("runs", "status", "topology", "checkpoints", "logs"):
        done = await asyncio.to_thread(reflux, command)
        assert done.returncode == 0, done.stderr
    assert (await asyncio.to_thread(reflux, "watch", "no-such-run")).returncode == 2


async def latest_checkpoint(run):
    async with connection.channel("checkpoint") as channel:
        request = checkpoint_pb.GetLatestCheckpointRequest(run=run)
        return (await CheckpointServiceStub(channel).GetLatestCheckpoint(request)).checkpoint


def reflux(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reflux_client.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


async def test_no_http_door_answers_without_the_stacks_token(harness):
    http = harness.record.http
    urls = [f"http://{http['trainer']}/v1/runs", f"http://{http['inference-gateway']}/v1/models"]
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(url) as response:
                assert response.status == 401, url
