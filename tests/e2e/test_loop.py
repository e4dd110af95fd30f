"""The whole loop through all services: small runs on the real stack."""

import asyncio
import json
from pathlib import Path

import aiohttp
import grpc
import pytest
from e2e_stack import small_run

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from reflux.checkpoint.v1.checkpoint_pb2 import Checkpoint
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from reflux.trainer.v1 import trainer_service_pb2 as trainer_pb
from reflux.trainer.v1.run_pb2 import Run
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux_client import connection, tracing
from reflux_client.report.build import write_report
from reflux_kit import auth


@pytest.mark.parametrize(("transport", "max_lag"), [("ucx", 1), ("shm", 0)])
async def test_a_small_run_goes_from_prompt_to_report(harness, transport, max_lag):
    created = await harness.create(
        small_run(f"loop-{transport}", fleet={"transport": transport}, rl={"max_lag": max_lag})
    )
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == 6
    assert summary["ledger"]["violations"] == []
    assert max(map(int, summary["lag_histogram"])) <= max_lag
    assert sum(summary["lag_histogram"].values()) == 6 * 4 * 4
    assert summary["peak_rss_bytes"] > 0
    assert len(summary["versions"]) == 2
    text = write_report(Path(ended.folder)).read_text()
    assert text.count("<svg") >= 6


async def test_a_sample_can_be_traced_from_prompt_to_optimizer_step(harness):
    created = await harness.create(small_run("traced"))
    ended = await harness.wait_end(created.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    run_id = ended.name.removeprefix("runs/")
    samples = [json.loads(line) for line in (Path(ended.folder) / "samples.jsonl").read_text().splitlines()]
    trained = next(sample["sample"] for sample in samples if sample["stage"] == "rl")
    prompt = tracing.parse_sample_id(trained)[1]
    names: list[str] = []
    for _ in range(50):  # exporters write every half second
        roots = tracing.find_tree(harness.folder / "traces", run_id, prompt)
        names = [name for root in roots for name in _names(root)]
        if "optimizer step" in names:
            break
        await asyncio.sleep(0.1)
    assert {"prompt", "generate", "verify", "optimizer step"} <= set(names)


def _names(node: tracing.SpanNode) -> list[str]:
    return [node.record["name"], *(name for child in node.children for name in _names(child))]


async def test_a_cancelled_run_continues_from_its_committed_checkpoint(harness):
    name = (await harness.create(small_run("continued", rl={"steps": 400}))).name
    await harness.wait_step(name, 4)
    async with connection.channel("trainer") as channel:
        await TrainerServiceStub(channel).CancelRun(trainer_pb.CancelRunRequest(name=name))
    cancelled = await harness.wait_end(name)
    async with connection.channel("checkpoint") as channel:
        request = checkpoint_pb.GetLatestCheckpointRequest(run=name.removeprefix("runs/"))
        latest = (await CheckpointServiceStub(channel).GetLatestCheckpoint(request)).checkpoint
    assert latest.state == Checkpoint.STATE_COMMITTED
    assert 2 <= latest.cursor.step <= cancelled.step
    steps = cancelled.step + 4
    again = await harness.create(small_run("continued", rl={"steps": steps}), resume_run=name.removeprefix("runs/"))
    ended = await harness.wait_end(again.name)
    assert ended.state == Run.STATE_SUCCEEDED, ended.message
    summary = harness.summary(ended)
    assert summary["steps"] == steps
    assert summary["ledger"]["violations"] == []


async def test_a_run_can_be_created_over_http_and_pauses_resumes_and_cancels(harness):
    base = f"http://{harness.record.http['trainer']}"
    headers = {"Authorization": f"Bearer {auth.mint(connection.settings().stack_secret, 'researcher')}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{base}/v1/runs", json={"config": small_run("http", rl={"steps": 400})}) as response:
            assert response.status in (200, 201), await response.text()
            created = await response.json()
        name = created["name"]
        await harness.wait_step(name, 1)
        async with connection.channel("trainer") as channel:
            stub = TrainerServiceStub(channel)
            await stub.PauseRun(trainer_pb.PauseRunRequest(name=name))
            paused = await harness.get(name)
            assert paused.state == Run.STATE_PAUSED
            await stub.ResumeRun(trainer_pb.ResumeRunRequest(name=name))
            await harness.wait_step(name, paused.step + 2)
            await stub.CancelRun(trainer_pb.CancelRunRequest(name=name))
        assert (await harness.wait_end(name)).state == Run.STATE_CANCELLED


async def test_the_trained_model_answers_over_the_openai_api(harness):
    created = await harness.create(small_run("served", rl={"steps": 400}))
    await harness.wait_step(created.name, 1)
    base = f"http://{harness.record.http['inference-gateway']}/v1"
    headers = {"Authorization": f"Bearer {auth.mint(connection.settings().stack_secret, 'researcher')}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"{base}/models") as response:
            models = [model["id"] for model in (await response.json())["data"]]
        (model,) = [each for each in models if created.name.removeprefix("runs/") in each]
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "n": 2, "logprobs": 1, "seed": 3}
        async with session.post(f"{base}/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["prompt_tokens"] == 3
    async with connection.channel("trainer") as channel:
        await TrainerServiceStub(channel).CancelRun(trainer_pb.CancelRunRequest(name=created.name))
    await harness.wait_end(created.name)


@pytest.mark.parametrize(
    "service", ["scheduler", "trainer", "inference-gateway", "weight-broker", "sandbox", "checkpoint"]
)
async def test_no_service_answers_without_the_stacks_token(harness, service):
    async with grpc.aio.insecure_channel(harness.record.grpc[service]) as channel:
        for method in ("/reflux.trainer.v1.TrainerService/ListRuns", "/reflux.sandbox.v1.SandboxService/GetStatus"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


async def test_no_http_door_answers_without_the_stacks_token(harness):
    http = harness.record.http
    urls = [f"http://{http['trainer']}/v1/runs", f"http://{http['inference-gateway']}/v1/models"]
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(url) as response:
                assert response.status == 401, url
