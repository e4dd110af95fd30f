"""A queue of verifications that is too deep holds new groups back at a real gateway, and lets go by itself."""

import asyncio

import grpc
import pytest

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_inference_gateway.main import build
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.server import running
from reflux_sandbox import hold_back
from reflux_sandbox.hold_back import held_next, holding_back
from reflux_sandbox.settings import SandboxSettings

OPEN = {"stack_secret": "", "token": ""}
"""Without tokens, whatever the environment of a stack beside says."""


@pytest.mark.parametrize(
    ("holding", "depth", "expected"),
    [(False, 0, False), (False, 10, False), (False, 11, True), (True, 6, True), (True, 5, False), (True, 0, False)],
)
def test_groups_are_held_above_the_bound_and_begin_again_at_half_of_it(holding, depth, expected):
    assert held_next(holding, depth, above=10) is expected


async def test_a_deep_queue_holds_and_a_watcher_that_dies_leaves_nothing_held(monkeypatch):
    monkeypatch.setattr(hold_back, "_PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(hold_back, "_LEASE_SECONDS", 1.0)
    depth = {"rule": 0, "full": 0}

    async def depths():
        return depth

    settings = GatewaySettings(listen="127.0.0.1:0", http_listen="127.0.0.1:0", drain_seconds=0, **OPEN)
    async with (
        build(settings) as service,
        running(service, settings) as bound,
        grpc.aio.insecure_channel(bound.grpc) as channel,
    ):
        stub = InferenceGatewayServiceStub(channel)

        async def until(expected):
            async with asyncio.timeout(10):
                while True:
                    now = await stub.WatchFleet(pb.WatchFleetRequest(), timeout=5).read()
                    if list(now.held_back_models) == expected:
                        return
                    await asyncio.sleep(0.02)

        sandbox = SandboxSettings(gateway_address=bound.grpc, hold_groups_above=10, **OPEN)
        async with holding_back(sandbox, depths):
            await until([])
            depth["full"] = 11
            await until(["*"])
            await asyncio.sleep(1.3)
            await until(["*"])  # the lease is renewed
            depth["full"] = 4
            await until([])
            depth["rule"] = 30
            await until(["*"])
        await until([])  # nobody renews it any more


async def test_a_gateway_that_is_away_costs_nothing_but_a_line(caplog, monkeypatch):
    monkeypatch.setattr(hold_back, "_PERIOD_SECONDS", 0.05)

    async def depths():
        return {"full": 100}

    async with holding_back(SandboxSettings(gateway_address="127.0.0.1:1", hold_groups_above=10, **OPEN), depths):
        async with asyncio.timeout(10):
            while "does not hold groups back" not in caplog.text:
                await asyncio.sleep(0.05)
