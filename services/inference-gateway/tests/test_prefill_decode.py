"""Prefill and decode on real engine processes behind a real gateway: the bits of one engine, whatever dies when."""

import asyncio
import contextlib
import signal
import time

import aiohttp
import grpc
import pytest

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import engine_service_pb2 as engine_pb
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import EngineServiceStub
from reflux.inference_gateway.v1.replica_pb2 import Replica
from reflux_inference_gateway.metrics import PREFILL_LEGS, PULLS

from .conftest import EngineProcess
from .gateway_harness import gateway

PROMPT = [2 + at % 38 for at in range(60)]


def asked(name, prompt=PROMPT, n=2, **fields):
    return pb.GenerateGroupRequest(
        request_id=name,
        model_id="tiny",
        prompt_token_ids=prompt,
        num_samples=n,
        sampling=SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, **fields),
        whole_group=True,
    )


async def drawn(stub, request, timeout=30):
    samples = [one async for answer in stub.GenerateGroup(request, timeout=timeout) for one in answer.samples]
    return [(list(one.token_ids), list(one.logprobs), one.finish_reason) for one in samples]


def counts(metric):
    return {
        sample.labels["outcome"]: sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


class Pair:
    """A gateway, engines by role, and what was counted since."""

    def __init__(self, door, engines, replicas):
        self.stub, self.engines, self.replicas = door.stub, engines, replicas
        self._before = {metric: counts(metric) for metric in (PREFILL_LEGS, PULLS)}

    def since(self, metric):
        before = self._before[metric]
        return {name: now - before.get(name, 0) for name, now in counts(metric).items() if now != before.get(name, 0)}

    @contextlib.asynccontextmanager
    async def engine(self, role):
        async with grpc.aio.insecure_channel(self.replicas[role].grpc_address) as channel:
            yield EngineServiceStub(channel)

    async def metric(self, role, line):
        async with aiohttp.ClientSession() as session, session.get(self.replicas[role].http_url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(one.split()[-1]) for one in lines if one.startswith(line))


@contextlib.asynccontextmanager
async def fleet_of(folder, tmp_path, ready_replicas, roles, **settings):
    fields = {"heartbeat_seconds": 0.2, "remote_prefill_tokens": 32, "replica_wait_seconds": 5.0, **settings}
    async with gateway(**fields) as door, contextlib.AsyncExitStack() as stack:
        address = door.address
        engines = {}
        for number, (role, extra) in enumerate(roles):
            process = EngineProcess(folder, address, tmp_path / f"{number}.log", ROLE=role, MAX_ROWS="8", **extra)
            engines[f"{role}{number}"] = process
            stack.callback(process.stop)
        found = await ready_replicas(address, "tiny", len(roles))
        names = {Replica.ROLE_PREFILL: "prefill", Replica.ROLE_DECODE: "decode", Replica.ROLE_BOTH: "both"}
        yield Pair(door, engines, {names[one.role]: one for one in found})


def process_of(pair, role):
    return next(process for name, process in pair.engines.items() if name.startswith(role))


async def test_a_prompt_computed_elsewhere_gives_the_bits_of_one_engine_and_frees_what_it_took(
    model_folder, tmp_path, ready_replicas
):
    roles = [("prefill", {}), ("decode", {})]
    async with fleet_of(model_folder, tmp_path, ready_replicas, roles) as pair:
        remote = await drawn(pair.stub, asked("remote"))
        assert pair.since(PREFILL_LEGS) == {"remote": 1}
        assert pair.since(PULLS) == {"used": 1}
        async with asyncio.timeout(5):
            while await pair.metric("prefill", "reflux_engine_offered_bytes"):
                await asyncio.sleep(0.02)
        assert await pair.metric("decode", "reflux_engine_prefilled_tokens_total") == 0
        async with pair.engine("prefill") as stub:  # the same engine code on its own, same batch shape
            one = engine_pb.GenerateRequest(
                request_id="m", prompt_token_ids=PROMPT, num_samples=2, sampling=asked("m").sampling, whole_group=True
            )
            whole = [sample async for answer in stub.Generate(one, timeout=30) for sample in answer.samples]
        assert remote == [(list(s.token_ids), list(s.logprobs), s.finish_reason) for s in whole]

        await drawn(pair.stub, asked("cached"))
        await drawn(pair.stub, asked("short", PROMPT[:20]))
        assert pair.since(PREFILL_LEGS) == {"remote": 1, "cached": 1, "short": 1}

        process_of(pair, "prefill").kill(signal.SIGKILL)
        start = time.monotonic()
        again = await drawn(pair.stub, asked("lost", PROMPT[::-1]))
        assert time.monotonic() - start < 1.0
        assert len(again) == 2
        assert {"lost", "nobody"} & pair.since(PREFILL_LEGS).keys()


@pytest.mark.slow
async def test_a_role_changes_when_nothing_runs_and_the_gateway_hears_of_it(model_folder, tmp_path, ready_replicas):
    async with fleet_of(model_folder, tmp_path, ready_replicas, [("both", {}), ("decode", {})]) as pair:
        async with pair.engine("both") as stub:
            await stub.SetRole(engine_pb.SetRoleRequest(role=Replica.ROLE_PREFILL), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.SetRole(engine_pb.SetRoleRequest(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(5):
            while not pair.since(PREFILL_LEGS).get("remote"):
                await drawn(pair.stub, asked("r", [3 + time.monotonic_ns() % 30, *PROMPT]))


@pytest.mark.slow
async def test_a_full_memory_for_prompts_is_a_prefill_where_it_is_decoded(model_folder, tmp_path, ready_replicas):
    roles = [("prefill", {"HANDOVER_BYTES": "1000"}), ("decode", {})]
    async with fleet_of(model_folder, tmp_path, ready_replicas, roles) as pair:
        assert len(await drawn(pair.stub, asked("full"))) == 2
        assert pair.since(PREFILL_LEGS) == {"full": 1}
        assert await pair.metric("decode", "reflux_engine_prefilled_tokens_total") == len(PROMPT) - 1
        assert await pair.metric("prefill", 'reflux_engine_handovers_total{outcome="refused"}') == 1


@pytest.mark.slow
async def test_an_offer_that_nobody_reads_is_freed_at_the_end_of_its_lease(model_folder, tmp_path, ready_replicas):
    roles = [("prefill", {"HANDOVER_SECONDS": "0.5"}), ("decode", {})]
    async with fleet_of(model_folder, tmp_path, ready_replicas, roles) as pair, pair.engine("prefill") as stub:
        answer = await stub.Prefill(engine_pb.PrefillRequest(request_id="x", prompt_token_ids=PROMPT), timeout=5)
        assert await pair.metric("prefill", "reflux_engine_offered_bytes") > 0
        async with asyncio.timeout(5):
            while await pair.metric("prefill", "reflux_engine_offered_bytes"):
                await asyncio.sleep(0.05)
        assert await pair.metric("prefill", 'reflux_engine_handovers_total{outcome="expired"}') == 1
        async with pair.engine("decode") as decode:
            late = engine_pb.GenerateRequest(
                request_id="y",
                prompt_token_ids=PROMPT,
                num_samples=1,
                sampling=asked("y").sampling,
                ticket=answer.ticket,
            )
            first, *rest = [one async for one in decode.Generate(late, timeout=10)]
        assert first.pull == first.PULL_FAILED
        assert len(rest[-1].samples) == 1


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
async def test_a_prefill_that_dies_while_it_computes_costs_nobody_the_answer(
    model_folder, tmp_path, ready_replicas, others
):
    roles = [("prefill", {}), ("decode", {}), *[("prefill", {})] * others]
    async with fleet_of(model_folder, tmp_path, ready_replicas, roles) as pair:
        victims = [process for name, process in pair.engines.items() if name.startswith("prefill")]
        for one in victims:
            one.kill(signal.SIGSTOP)  # it takes prompts and computes none: they are in flight for sure
        call = asyncio.create_task(drawn(pair.stub, asked("k")))
        await asyncio.sleep(0.3)
        assert not call.done()
        for one in victims:
            one.kill(signal.SIGKILL)
        start = time.monotonic()
        assert len(await call) == 2
        assert time.monotonic() - start < 1.0
        assert pair.since(PREFILL_LEGS) == {"lost": 1 + others}
        assert await pair.metric("decode", "reflux_engine_prefilled_tokens_total") == len(PROMPT) - 1


@pytest.mark.slow
async def test_a_decode_that_dies_with_a_ticket_is_not_replaced_and_the_prompt_is_freed(
    model_folder, tmp_path, ready_replicas
):
    async with fleet_of(model_folder, tmp_path, ready_replicas, [("prefill", {}), *[("decode", {})] * 2]) as pair:
        victims = [process for name, process in pair.engines.items() if name.startswith("decode")]
        for one in victims:
            one.kill(signal.SIGSTOP)
        call = asyncio.create_task(drawn(pair.stub, asked("k")))
        async with asyncio.timeout(5):
            while not pair.since(PREFILL_LEGS):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert await pair.metric("prefill", "reflux_engine_offered_bytes") > 0
        for one in victims:
            one.kill(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call
        assert time.monotonic() - start < 1.0
        assert "handed over" in lost.value.details()
        async with asyncio.timeout(5):
            while await pair.metric("prefill", "reflux_engine_offered_bytes"):
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_prefill_that_dies_after_its_ticket_leaves_the_decode_a_prompt_to_compute(
    model_folder, tmp_path, ready_replicas
):
    async with fleet_of(model_folder, tmp_path, ready_replicas, [("prefill", {}), ("decode", {})]) as pair:
        async with pair.engine("prefill") as stub:
            answer = await stub.Prefill(engine_pb.PrefillRequest(request_id="x", prompt_token_ids=PROMPT), timeout=5)
        victim = process_of(pair, "prefill")
        victim.kill(signal.SIGKILL)
        victim.process.wait(10)
        start = time.monotonic()
        async with pair.engine("decode") as decode:
            request = engine_pb.GenerateRequest(
                request_id="y",
                prompt_token_ids=PROMPT,
                num_samples=2,
                sampling=asked("y").sampling,
                ticket=answer.ticket,
            )
            first, *rest = [one async for one in decode.Generate(request, timeout=10)]
            assert sum(len(one.samples) for one in rest) == 2
            status = await decode.GetStatus(engine_pb.GetStatusRequest(), timeout=5)
        assert time.monotonic() - start < 2.0
        # Memory that outlives its owner (shm) may still be read, and then it is checked; else it is computed here.
        assert first.pull in (first.PULL_USED, first.PULL_FAILED)
        assert status.replica.sequences == 0
