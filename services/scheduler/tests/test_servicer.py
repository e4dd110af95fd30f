"""Bad requests to every method of both services, over real gRPC."""

import os
import random
import uuid

import grpc
import pytest

from reflux.common.v1 import common_pb2
from reflux.scheduler.v1 import agent_service_pb2, job_pb2, scheduler_service_pb2
from reflux.scheduler.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from reflux.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings
from reflux_scheduler.agent.members import MemberTable
from reflux_scheduler.agent.servicer import SERVICE_NAME as AGENT_SERVICE
from reflux_scheduler.agent.servicer import AgentServicer
from reflux_scheduler.agent.supervisor import Household
from reflux_scheduler.main import SchedulerSettings, build

FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@pytest.fixture
async def scheduler(tmp_path, valkey):
    topology = tmp_path / "topology.toml"
    topology.write_text(
        '[cluster]\nname = "c"\n[node_types.t]\ncpus = 1\nmemory = "1GiB"\n'
        '[[block]]\nname = "b"\n[[block.rack]]\nname = "r"\nnode_type = "t"\nnodes = ["n1"]\n'
    )
    settings = SchedulerSettings(listen="127.0.0.1:0", drain_seconds=0, redis_url=f"{valkey}/2", topology=str(topology))
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as channel:
        yield channel


@pytest.fixture
async def agent(tmp_path):
    members = MemberTable(Household("n1", dict(os.environ), tmp_path, log_limit_bytes=1 << 16))
    mount = Mount(AgentServicer(members, "n1"), add_AgentServiceServicer_to_server, AGENT_SERVICE)
    settings = ServiceSettings(drain_seconds=0)
    async with running(Service((mount,)), settings) as bound, open_channel(bound.grpc) as channel:
        yield channel
    await members.close()


def methods(descriptor):
    return [(f"/{descriptor.full_name}/{method.name}", method) for method in descriptor.methods]


async def call(channel, path, method, raw: bytes) -> grpc.StatusCode:
    """Sends raw bytes; the status of the answer, or of the first message of a stream."""
    try:
        if method.server_streaming:
            stream = channel.unary_stream(path)(raw, timeout=5)
            async for _ in stream:
                stream.cancel()
                break
        else:
            await channel.unary_unary(path)(raw, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def random_message(message_type, source: random.Random):
    message = message_type()
    fill(message, source, depth=0)
    return message


def fill(message, source: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if source.random() < 0.2:
            continue
        values = [value for _ in range(source.randint(1, 3)) if (value := draw(field, source, depth)) is not None]
        if field.is_repeated:
            if field.message_type:
                for value in values:
                    getattr(message, field.name).add().CopyFrom(value)
            else:
                getattr(message, field.name).extend(values)
        elif values and field.message_type:
            getattr(message, field.name).CopyFrom(values[0])
        elif values:
            setattr(message, field.name, values[0])


def draw(field, source: random.Random, depth: int):
    if field.message_type:
        if depth > 2:
            return None
        value = field.message_type._concrete_class()
        fill(value, source, depth + 1)
        return value
    if field.cpp_type == field.CPPTYPE_STRING:
        return source.choice(["", "x", "jobs/x", "j/r/0", "n1", "\0", "../..", "jobs/", "a" * 5000, "node", "\u2603"])
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return source.choice([0.0, -1.0, 1e308, float("nan"), float("inf"), 0.5])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return source.random() < 0.5
    return source.choice([0, 1, 7, 2**31 - 1])


async def check_all(channel, module, caplog) -> None:
    (descriptor,) = module.DESCRIPTOR.services_by_name.values()
    source = random.Random(7)
    for path, method in methods(descriptor):
        requests = [b"", b"\xff\xff\xff", source.randbytes(40)]
        requests += [random_message(method.input_type._concrete_class, source).SerializeToString() for _ in range(25)]
        for raw in requests:
            assert await call(channel, path, method, raw) in FINE, path
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_scheduler_answers_empty_garbled_and_random_requests_with_a_status(scheduler, caplog):
    await check_all(scheduler, scheduler_service_pb2, caplog)


async def test_the_agent_answers_empty_garbled_and_random_requests_with_a_status(agent, caplog):
    await check_all(agent, agent_service_pb2, caplog)


def create(**fields) -> scheduler_service_pb2.CreateJobRequest:
    spec = {"role": "learner", "count": 1, "argv": ["python"], **fields}
    role = job_pb2.RoleSpec(**spec)
    return scheduler_service_pb2.CreateJobRequest(request_id=str(uuid.uuid4()), roles=[role])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "Learner"}, "lower-case"),
        ({"role": "../x"}, "lower-case"),
        ({"count": 0}, "there is nothing to run"),
        ({"argv": []}, "name a program"),
        ({"resources": common_pb2.Resources(gpus=0.5)}, "whole GPUs"),
        ({"resources": common_pb2.Resources(cpus=float("nan"))}, "zero or more"),
        ({"required_level": "pod"}, "known: node, rack, block, cluster"),
        ({"stop_grace_seconds": -1.0}, "stop_grace_seconds"),
        ({"environment": [job_pb2.EnvironmentVariable(name="A=B")]}, "is not a variable"),
    ],
)
async def test_a_bad_job_is_refused_with_key_and_way_out(scheduler, fields, words):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await SchedulerServiceStub(scheduler).CreateJob(create(**fields), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()
