"""Every gRPC method of every service answers an empty and a random request with a status, and no traceback in a log."""

import random
import re
from pathlib import Path

import aiohttp
import grpc
import pytest
from e2e_stack import small_run
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint
from reflux.inference_gateway.v1 import engine_service_pb2 as engine
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux.sandbox.v1 import ladder_service_pb2 as ladder
from reflux.sandbox.v1 import sandbox_service_pb2 as sandbox
from reflux.sandbox.v1 import session_service_pb2 as session
from reflux.scheduler.v1 import agent_service_pb2 as agent
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler
from reflux.trainer.v1 import trainer_service_pb2 as trainer
from reflux.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker
from reflux_client import connection
from reflux_kit import auth
from reflux_kit.channel import open_channel
from reflux_kit.settings import ServiceSettings

ROOT = Path(__file__).parents[2]

FILES = [
    ("checkpoint", checkpoint, "CheckpointService"),
    ("inference-gateway", gateway, "InferenceGatewayService"),
    ("sandbox", sandbox, "SandboxService"),
    ("sandbox", session, "SandboxSessionService"),
    ("sandbox", ladder, "LadderService"),
    ("scheduler", scheduler, "SchedulerService"),
    ("agent", agent, "AgentService"),
    ("trainer", trainer, "TrainerService"),
    ("weight-broker", broker, "WeightBrokerService"),
]
METHODS = [
    (service, method) for service, module, name in FILES for method in module.DESCRIPTOR.services_by_name[name].methods
]
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)


def random_message(descriptor, source: random.Random, depth: int = 0) -> Message:
    """A message with about half of its fields set to arbitrary values."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if source.random() < 0.5 or (field.message_type and depth > 2):
            continue
        count = source.randint(1, 3) if field.is_repeated else 1
        for _ in range(count):
            set_field(message, field, source, depth)
    return message


def set_field(message: Message, field: FieldDescriptor, source: random.Random, depth: int) -> None:
    if field.message_type:
        value = random_message(field.message_type, source, depth + 1)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            getattr(message, field.name).CopyFrom(value)
        return
    value = scalar(field, source)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def scalar(field: FieldDescriptor, source: random.Random):
    if field.enum_type:
        return source.choice([value.number for value in field.enum_type.values])
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        raw = source.choice([b"", b"\x00\xff", b"x" * 300, b"jobs/1", b"runs/none", b"{run}", b"../../etc"])
        return raw if field.type == FieldDescriptor.TYPE_BYTES else raw.decode("latin-1")
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return source.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return source.random() < 0.5
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return source.choice([0, 1, 2, 2**bits - 1])
    return source.choice([0, 1, -1, 2 ** (bits - 1) - 1])


async def status_of(channel, method: MethodDescriptor, request: Message) -> grpc.StatusCode:
    """Calls a method once; a stream is read for at most one answer, a call that waits runs into its deadline."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=lambda message: message.SerializeToString())(request, timeout=1.5)
    try:
        if method.server_streaming:
            async for _ in call:
                break
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("service", "method"), METHODS, ids=[f"{service}-{method.name}" for service, method in METHODS]
)
async def test_a_method_answers_empty_and_random_requests_with_a_status(harness, service, method):
    log = harness.folder / "logs" / f"{service}.log"
    before = log.stat().st_size
    source = random.Random(method.full_name)
    empty = message_factory.GetMessageClass(method.input_type)()
    requests = [empty, *(random_message(method.input_type, source) for _ in range(4))]
    settings = connection.settings()
    async with open_channel(harness.record.grpc[service], settings) as channel:
        codes = [await status_of(channel, method, request) for request in requests]
    assert not set(codes) & set(BAD), codes
    with log.open() as file:
        file.seek(before)
        assert "Traceback" not in file.read()


@pytest.mark.parametrize(
    ("service", "method"), METHODS, ids=[f"{service}-{method.name}" for service, method in METHODS]
)
async def test_a_method_refuses_calls_without_the_stacks_token(harness, service, method):
    request = message_factory.GetMessageClass(method.input_type)()
    for token in ("", "nonsense", auth.mint("another secret", "intruder")):
        async with open_channel(harness.record.grpc[service], ServiceSettings(token=token, stack_secret="")) as channel:
            assert await status_of(channel, method, request) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_processes_of_a_run_refuse_calls_without_the_stacks_token(harness):
    created = await harness.create(small_run("guarded", rl={"steps": 400}))
    await harness.wait_step(created.name, 1)
    async with connection.channel("inference-gateway") as channel:
        listed = await InferenceGatewayServiceStub(channel).ListReplicas(gateway.ListReplicasRequest())
    status = engine.DESCRIPTOR.services_by_name["EngineService"].methods_by_name["GetStatus"]
    for replica in listed.replicas:
        async with open_channel(replica.grpc_address, ServiceSettings(token="", stack_secret="")) as channel:
            code = await status_of(channel, status, engine.GetStatusRequest())
        assert code is grpc.StatusCode.UNAUTHENTICATED
        async with aiohttp.ClientSession() as session, session.get(f"{replica.http_url}/v1/models") as response:
            assert response.status == 401
    assert listed.replicas
    async with connection.channel("trainer") as channel:
        await TrainerServiceStub(channel).CancelRun(trainer.CancelRunRequest(name=created.name))
    await harness.wait_end(created.name)


def test_every_service_of_every_proto_is_covered():
    """The two services of a run's processes have their own tests of the same kind beside them."""
    text = "".join(path.read_text() for path in (ROOT / "protos").rglob("*_service.proto"))
    declared = set(re.findall(r"^service (\w+)", text, re.MULTILINE))
    assert {name for _, _, name in FILES} == declared - {"LearnerService", "EngineService"}
