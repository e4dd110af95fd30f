"""Shared fleets: seats of a run's adapter on real gRPC, the fleet's job, and what is refused before a run starts."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from trainer_peers import Broker, Checkpoints, Gateway, Learner, Sandbox, Scheduler, serving
from trainer_world import config

from reflux.inference_gateway.v1 import engine_service_pb2 as engine_pb
from reflux.inference_gateway.v1.engine_service_pb2_grpc import (
    EngineServiceServicer,
    add_EngineServiceServicer_to_server,
)
from reflux.scheduler.v1 import job_pb2
from reflux_kit.errors import CapacityExhausted, InvalidRequest
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_runs.errors import ConfigError
from reflux_runs.preflight import preflight
from reflux_runs.translate import from_message
from reflux_trainer import shared
from reflux_trainer.peers import open_peers
from reflux_trainer.settings import TrainerSettings


class Engine(EngineServiceServicer):
    """Has one seat."""

    def __init__(self):
        self.seat, self.attached, self.refuse = "", [], ""

    async def AttachAdapter(self, request, context):
        self.attached.append(request)
        if self.refuse:
            raise InvalidRequest(self.refuse)
        if self.seat not in ("", request.model_id):
            raise CapacityExhausted(f"all 1 seats for adapters are taken, by {self.seat}")
        self.seat = request.model_id
        return engine_pb.AttachAdapterResponse()

    async def DetachAdapter(self, request, context):
        self.seat = "" if self.seat == request.model_id else self.seat
        return engine_pb.DetachAdapterResponse()


class World:
    def __init__(self, peers, engine, scheduler):
        self.peers, self.engine, self.scheduler = peers, engine, scheduler


@asynccontextmanager
async def world(valkey_url, monkeypatch, **settings):
    monkeypatch.setattr(shared, "_RENEW_SECONDS", 0.05)
    monkeypatch.setattr(shared, "_STARTING_SECONDS", 0.05)
    engine, scheduler, gateway = Engine(), Scheduler(), Gateway()
    mount = Mount(engine, add_EngineServiceServicer_to_server, "reflux.inference_gateway.v1.EngineService")
    async with (
        running(Service((mount,)), ServiceSettings(drain_seconds=0)) as bound,
        serving(scheduler, gateway, Sandbox(), Checkpoints(), Broker(), Learner()) as address,
        open_redis(valkey_url) as redis,
    ):
        gateway.engine = bound.grpc
        await redis.flushdb()
        names = ("scheduler", "gateway", "broker", "sandbox", "checkpoint", "trainer")
        chosen = TrainerSettings(**{f"{name}_address": address for name in names}, redis_url=valkey_url, **settings)
        async with open_peers(redis, chosen) as peers:
            yield World(peers, engine, scheduler)


def run_config(folder, **fleet):
    model = {"path": str(folder), "lora_rank": 8}
    return from_message(config(model=model, fleet={"shared": "lab", "engines": 1} | fleet))


@asynccontextmanager
async def kept(seats):
    keeping = asyncio.create_task(seats.keep())
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def until(true):
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_run_takes_its_seat_and_the_next_one_waits_until_it_is_given_back(valkey_url, monkeypatch, tmp_path):
    async with world(valkey_url, monkeypatch) as w:
        first, second = (shared.SharedSeats(run, run_config(tmp_path), w.peers) for run in ("one-1", "two-2"))
        async with kept(second):
            async with kept(first):
                await until(lambda: w.engine.seat and len(w.engine.attached) > 4)
                sitting, waiting = (first, second) if w.engine.seat == "one-1/adapters/run" else (second, first)
                await until(lambda: "all 1 seats for adapters are taken, by" in waiting.why)
                assert waiting.why.startswith("the shared fleet lab: ")
            if sitting is first:
                await first.release()
                await until(lambda: w.engine.seat == "two-2/adapters/run")
        await second.release()
        assert w.engine.seat == ""


async def test_runs_that_start_a_fleet_at_once_start_one_job(valkey_url, monkeypatch, tmp_path):
    async with world(valkey_url, monkeypatch) as w:
        runs = [shared.SharedSeats(f"run-{number}", run_config(tmp_path), w.peers) for number in range(3)]
        await asyncio.gather(*(seats._start() for seats in runs))
        assert len(set(w.scheduler.request_ids)) == 1
        (engines,) = w.scheduler.roles
        environment = {each.name: each.value for each in engines.environment}
        assert (engines.count, environment["REFLUX_ENGINE_MODEL_ID"]) == (1, "shared-lab")
        assert (environment["REFLUX_ENGINE_MODEL"], environment["REFLUX_ENGINE_MAX_ADAPTERS"]) == (str(tmp_path), "8")


async def test_what_the_engine_refuses_ends_the_run_with_its_words(valkey_url, monkeypatch, tmp_path):
    async with world(valkey_url, monkeypatch) as w:
        w.engine.refuse = "rank 8 exceeds the 4 that this engine takes"
        with pytest.raises(shared.SeatRefused, match="the shared fleet lab: rank 8 exceeds the 4"):
            await asyncio.wait_for(shared.SharedSeats("one-1", run_config(tmp_path), w.peers).keep(), 10)


async def test_an_idle_fleet_ends_and_a_dead_one_starts_again(valkey_url, monkeypatch, tmp_path):
    async with world(valkey_url, monkeypatch) as w:
        monkeypatch.setattr("reflux_trainer.standing._SEEN_SECONDS", 0.0)
        async with kept(shared.SharedSeats("one-1", run_config(tmp_path), w.peers)):
            await until(lambda: w.engine.seat)
            w.scheduler.job.state = job_pb2.Job.STATE_FAILED
            await until(lambda: len(set(w.scheduler.request_ids)) > 1)
            w.scheduler.job.state = job_pb2.Job.STATE_RUNNING
        await shared.end_idle_fleets(w.peers, 60.0)
        assert not w.scheduler.cancelled.is_set(), "a run had a seat a moment ago"
        await asyncio.sleep(0.02)
        await shared.end_idle_fleets(w.peers, 0.01)
        assert w.scheduler.cancelled.is_set()
        assert not await w.peers.redis.hkeys(shared._FLEETS)


async def test_another_base_type_or_rank_is_refused_before_the_run_starts(valkey_url, monkeypatch, tmp_path):
    async with world(valkey_url, monkeypatch, shared_max_rank=8) as w:
        await shared.check_shared(w.peers, run_config(tmp_path))
        spec = {"folder": "/models/other", "weight_dtype": "float32", "engines": 1, "used_at": 0.0}
        await w.peers.redis.hset(shared._FLEETS, "lab", json.dumps(spec))
        with pytest.raises(ConfigError, match=r"serves another model.*/models/other"):
            await shared.check_shared(w.peers, run_config(tmp_path))
        await w.peers.redis.hset(shared._FLEETS, "lab", json.dumps(spec | {"folder": str(tmp_path)}))
        with pytest.raises(ConfigError, match="computes in another type"):
            await shared.check_shared(w.peers, run_config(tmp_path, weight_dtype="bfloat16"))
        much = from_message(config(model={"path": str(tmp_path), "lora_rank": 9}, fleet={"shared": "lab"}))
        with pytest.raises(ConfigError, match="at most 8 ranks"):
            await shared.check_shared(w.peers, much)


def test_a_shared_fleet_needs_an_adapter_and_a_folder():
    with pytest.raises(ConfigError, match=r"fleet\.shared.*set model\.lora_rank and model\.path"):
        preflight(from_message(config(fleet={"shared": "lab"})))
