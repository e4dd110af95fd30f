"""The gateway with two real engine processes."""

import asyncio
import os
import signal

import aiohttp
import pytest
import torch

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway.engine.loading import load_model
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.types import sample_seed
from reflux_kit.errors import StartupError
from reflux_model.folder import load_folder
from reflux_model.training import logprobs


def group(request_id, prompt=(5, 6, 7), n=4, max_tokens=10, seed=1, **fields):
    return pb.GenerateGroupRequest(
        request_id=request_id,
        model_id="tiny",
        prompt_token_ids=prompt,
        num_samples=n,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed),
        **fields,
    )


async def collect(stub, request, timeout=90):
    """All samples by index, and the replicas that made them."""
    samples, replicas = {}, set()
    async for response in stub.GenerateGroup(request, timeout=timeout):
        replicas.add(response.replica)
        for sample in response.samples if request.whole_group else [response.sample]:
            assert sample.index not in samples
            samples[sample.index] = sample
    assert sorted(samples) == list(range(request.num_samples))
    return [samples[index] for index in range(request.num_samples)], replicas


async def test_group_comes_with_ids_log_probs_and_versions_that_a_recomputation_confirms(stub, fleet):
    streamed, _ = await collect(stub, group("a", n=6))
    whole, _ = await collect(stub, group("b", n=6, whole_group=True))
    config, params = load_folder(fleet.folder)
    expected = logprobs(params, config, [[5, 6, 7]], [[list(sample.token_ids) for sample in streamed]])
    for left, right, row in zip(streamed, whole, expected, strict=True):
        assert left == right
        assert torch.allclose(torch.tensor(list(left.logprobs)), row, atol=1e-4)
        assert [(span.version, span.start, span.end) for span in left.versions] == [(0, 0, len(left.token_ids))]


async def test_group_equals_single_requests_on_whichever_replica(stub):
    samples, _ = await collect(stub, group("g", n=5, seed=77))
    singles = await asyncio.gather(*(collect(stub, group(f"s{i}", n=1, seed=sample_seed(77, i))) for i in range(5)))
    assert [list(one[0][0].token_ids) for one in singles] == [list(sample.token_ids) for sample in samples]
    assert len({replica for _, replicas in singles for replica in replicas}) == 2


async def test_pause_holds_fifty_requests_and_loses_none(stub, fleet):
    await stub.PauseFleet(pb.PauseFleetRequest(model_id="tiny"), timeout=5)
    calls = [asyncio.create_task(collect(stub, group(f"p{i}", n=2, seed=i))) for i in range(25)]
    async with aiohttp.ClientSession(fleet.gateway.http) as session:
        calls += [asyncio.create_task(complete(session, prompt=[3, i], seed=i)) for i in range(2, 27)]
        await held(fleet, 50)
        assert not any(call.done() for call in calls)
        resumed = await stub.ResumeFleet(pb.ResumeFleetRequest(model_id="tiny"), timeout=5)
        assert resumed.released == 50
        results = await asyncio.gather(*calls)
    assert len(results) == 50
    again, _ = await collect(stub, group("again", n=2, seed=3))
    assert [list(one.token_ids) for one in results[3][0]] == [list(one.token_ids) for one in again]


async def complete(session, **fields):
    body = {"model": "tiny", "max_tokens": 8, **fields}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def held(fleet, count):
    async with aiohttp.ClientSession(fleet.gateway.http) as session, asyncio.timeout(60):
        while True:
            async with session.get("/metrics") as response:
                if f"reflux_gateway_held_requests {float(count)}\n" in await response.text():
                    return


async def test_abort_ends_held_and_running_groups(stub):
    await stub.PauseFleet(pb.PauseFleetRequest(), timeout=5)
    call = asyncio.create_task(collect(stub, group("held", n=3)))
    while not (await stub.Abort(pb.AbortRequest(request_id="held"), timeout=5)).found:
        await asyncio.sleep(0)
    samples, _ = await asyncio.wait_for(call, 10)
    assert [(sample.finish_reason, len(sample.token_ids)) for sample in samples] == [("abort", 0)] * 3
    await stub.ResumeFleet(pb.ResumeFleetRequest(), timeout=5)

    reasons = []
    async for response in stub.GenerateGroup(group("running", n=1024, max_tokens=90), timeout=60):
        if not reasons:
            assert (await stub.Abort(pb.AbortRequest(request_id="running"), timeout=5)).found
        reasons.append(response.sample.finish_reason)
    assert len(reasons) == 1024
    assert "abort" in reasons
    assert not (await stub.Abort(pb.AbortRequest(request_id="running"), timeout=5)).found


async def test_engines_register_again_with_a_restarted_gateway(fleet, ready_replicas):
    before = await ready_replicas(fleet.gateway.grpc, "tiny", 2)
    await asyncio.to_thread(fleet.gateway.stop)
    await asyncio.to_thread(fleet.gateway.start)
    after = await ready_replicas(fleet.gateway.grpc, "tiny", 2, seconds=30.0)
    assert {replica.name for replica in after} == {replica.name for replica in before}


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_model_folder_is_named(model_folder, tmp_path, missing):
    for path in model_folder.iterdir():
        if path.name != missing:
            os.link(path, tmp_path / path.name)
    with pytest.raises(StartupError, match=missing):
        load_model(EngineSettings(model=tmp_path))


def test_missing_model_folder_is_one_line_and_exit_code_2(start_engine, tmp_path):
    engine = start_engine(tmp_path / "nowhere", "127.0.0.1:1")
    assert engine.process.wait(120) == 2
    lines = engine.log.read_text().strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("reflux-engine: REFLUX_ENGINE_MODEL")
    assert "nowhere does not exist" in lines[0]


async def test_killed_replica_in_flight_is_replaced_by_the_other(stub, fleet, ready_replicas):
    victim = fleet.engines[1]
    replicas = await ready_replicas(fleet.gateway.grpc, "tiny", 2)
    port = victim.log.read_text().partition("gRPC on 127.0.0.1:")[2].split()[0]
    name = next(replica.name for replica in replicas if replica.grpc_address.endswith(f":{port}"))
    victim.kill(signal.SIGSTOP)  # it takes requests and answers none: they are in flight for sure
    calls = [asyncio.create_task(collect(stub, group(f"k{i}", n=3, seed=i, whole_group=True))) for i in range(24)]
    async with aiohttp.ClientSession(fleet.gateway.http) as session:
        calls += [asyncio.create_task(complete(session, prompt=[3, i], seed=i)) for i in range(2, 14)]
        await inflight(fleet, name)
        victim.kill(signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls), 90)
    assert len(results) == 36
    assert not any(name in replicas for _, replicas in results[:24])
    text = fleet.engines[0].log.read_text()
    assert "Traceback" not in text


async def inflight(fleet, name):
    async with aiohttp.ClientSession(fleet.gateway.http) as session, asyncio.timeout(60):
        while True:
            async with session.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            loads = [
                line for line in lines if line.startswith("reflux_gateway_replica_inflight_tokens") and name in line
            ]
            if loads and float(loads[0].split()[-1]) > 0:
                return
