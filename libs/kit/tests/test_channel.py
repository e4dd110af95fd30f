"""Tokens and sizes of a channel's calls, against a real server."""

import time
from types import SimpleNamespace

import grpc
import pytest

from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux.checkpoint.v1.checkpoint_service_pb2_grpc import (
    CheckpointServiceServicer,
    CheckpointServiceStub,
    add_CheckpointServiceServicer_to_server,
)
from reflux_kit import auth
from reflux_kit import channel as channel_module
from reflux_kit.channel import open_channel
from reflux_kit.server import Mount, Service, running
from reflux_kit.settings import ServiceSettings

SECRET = "a secret of the stack, long enough"
DAY = 86400.0


class Echo(CheckpointServiceServicer):
    """Answers a checkpoint with the name that was asked for, and keeps the tokens."""

    def __init__(self):
        self.tokens = []

    async def GetCheckpoint(self, request, context):
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        answer = pb.GetCheckpointResponse()
        answer.checkpoint.name = request.name
        return answer


def serving(servicer, **settings):
    name = pb.DESCRIPTOR.services_by_name["CheckpointService"].full_name
    service = Service((Mount(servicer, add_CheckpointServiceServicer_to_server, name),))
    return running(service, ServiceSettings(drain_seconds=0, **settings))


async def test_a_minted_token_is_renewed_before_it_ends_and_reused_until_then(monkeypatch):
    now = time.time()

    def at(moment):
        for module in (channel_module, auth):
            monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: moment))

    servicer = Echo()
    settings = ServiceSettings(stack_secret=SECRET)
    at(now - 31 * DAY)
    async with serving(servicer, stack_secret=SECRET) as bound, open_channel(bound.grpc, settings) as channel:
        stub = CheckpointServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="ExpiredSignature"):
            await stub.GetCheckpoint(pb.GetCheckpointRequest())
        at(now)
        await stub.GetCheckpoint(pb.GetCheckpointRequest())
        at(now + 60)
        await stub.GetCheckpoint(pb.GetCheckpointRequest())
    assert len(set(servicer.tokens)) == 1


async def test_a_fixed_token_stays_as_it_is():
    servicer = Echo()
    token = auth.mint(SECRET, "operator")
    settings = ServiceSettings(stack_secret=SECRET, token=token)
    async with serving(servicer, stack_secret=SECRET) as bound, open_channel(bound.grpc, settings) as channel:
        await CheckpointServiceStub(channel).GetCheckpoint(pb.GetCheckpointRequest())
    assert servicer.tokens == [f"Bearer {token}"]


async def test_a_message_above_4_mib_needs_a_larger_limit_on_both_sides():
    request = pb.GetCheckpointRequest(name="x" * (5 << 20))
    async with serving(Echo()) as bound, open_channel(bound.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await CheckpointServiceStub(channel).GetCheckpoint(request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with serving(Echo(), max_message_mib=8) as bound, open_channel(bound.grpc, max_message_mib=8) as channel:
        answer = await CheckpointServiceStub(channel).GetCheckpoint(request)
    assert len(answer.checkpoint.name) == 5 << 20
