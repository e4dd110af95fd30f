"""Every gRPC method of every service answers an empty and a random request with a status, and no traceback in a log."""

import random

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from reflux.checkpoint.v1 import checkpoint_service_pb2 as checkpoint
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as gateway
from reflux.sandbox.v1 import sandbox_service_pb2 as sandbox
from reflux.scheduler.v1 import agent_service_pb2 as agent
from reflux.scheduler.v1 import scheduler_service_pb2 as scheduler
from reflux.trainer.v1 import trainer_service_pb2 as trainer
from reflux.weight_broker.v1 import weight_broker_service_pb2 as broker
from reflux_client import connection
from reflux_kit.channel import open_channel

FILES = {
    "checkpoint": (checkpoint, "CheckpointService"),
    "inference-gateway": (gateway, "InferenceGatewayService"),
    "sandbox": (sandbox, "SandboxService"),
    "scheduler": (scheduler, "SchedulerService"),
    "agent": (agent, "AgentService"),
    "trainer": (trainer, "TrainerService"),
    "weight-broker": (broker, "WeightBrokerService"),
}
METHODS = [
    (service, method)
    for service, (module, name) in FILES.items()
    for method in module.DESCRIPTOR.services_by_name[name].methods
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


def test_all_services_of_all_protos_are_covered():
    pool = descriptor_pool.Default()
    covered = {pool.FindServiceByName(method.containing_service.full_name).name for _, method in METHODS}
    assert covered == {name for _, name in FILES.values()}
