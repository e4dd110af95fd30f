"""Traffic that is divided between versions and pools, canaries that are taken back, replicas that are spared."""

import asyncio
from collections import Counter
from contextlib import aclosing

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux_inference_gateway.dispatch import Dispatcher, ReplicaLost
from reflux_inference_gateway.division import Arm, Division
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.policy.breaker import Position
from reflux_inference_gateway.policy.traffic import CanaryLimits
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.want import Want

from .gateway_harness import FakeEngine, answers, engine_server, gateway, group


def dispatcher(*versions):
    made = Dispatcher(table=ReplicaTable(), fleet=Fleet(), new_policy=LeastLoaded, replica_wait_seconds=5.0)
    for number, version in enumerate(versions):
        made.table.register(info(number, version), made.clock())
    return made


def info(number, version=0):
    return ReplicaInfo(name=f"replicas/{number}", model_id="m", grpc_address=f"a:{number}", version=version)


async def owner(made, failing=(), **fields):
    async def send(replica, _):
        if replica.info.name in failing:
            raise ReplicaLost("died")
        yield replica.info.name

    want = Want(**({"model_id": "m", "num_tokens": 10, "deadline_seconds": 10.0} | fields))
    async with aclosing(made.stream_group(want, send)) as items:
        (name,) = [item async for item in items]
    return name


def division(canary="", **weights):
    """Arms of versions, called v0, v1 and so on."""
    arms = [Arm(name=name, weight=weight, version=int(name[1:])) for name, weight in weights.items()]
    return Division(arms, canary, CanaryLimits(error_rate=0.5, good_error_rate=0.01, requests_per_false_alarm=1e3))


@given(st.integers(1, 9), st.integers(1, 9), st.text(max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_session_stays_with_its_arm_and_arms_get_their_shares(left, right, session):
    made = dispatcher(0, 0, 1)
    made.verdicts.divisions["m"] = division(v0=left, v1=right)

    async def owners():
        alone = Counter([await owner(made) for _ in range(400)])
        return alone, {await owner(made, session=f"s{session}") for _ in range(5)}

    alone, of_session = asyncio.run(owners())
    share = alone["replicas/2"] / 400
    assert abs(share - right / (left + right)) < 0.15
    assert of_session == {"replicas/2"} or "replicas/2" not in of_session


async def test_a_change_of_weights_moves_held_requests_and_drops_none():
    made = dispatcher(0, 1)
    made.verdicts.divisions["m"] = division(v0=1, v1=0)
    made.fleet.pause()
    held = [asyncio.create_task(owner(made)) for _ in range(20)]
    await asyncio.sleep(0)
    made.verdicts.divisions["m"] = division(v0=0, v1=1)
    made.fleet.resume()
    made.changes.notify()
    assert set(await asyncio.gather(*held)) == {"replicas/1"}
    made.table.heartbeat(info(1, version=2), made.clock())
    assert await owner(made), "the arm has no replica any more, and lends its requests"


async def test_a_canary_that_fails_loses_its_weight_and_its_requests_are_answered_elsewhere():
    made = dispatcher(0, 1)
    made.verdicts.divisions["m"] = division(canary="v1", v0=1, v1=1)
    for _ in range(60):
        assert await owner(made, failing={"replicas/1"}) == "replicas/0"
        made.table.heartbeat(info(1, version=1), made.clock())
    traffic = made.verdicts.divisions["m"].traffic
    assert traffic.weights == {"v0": 1, "v1": 0}
    assert "fail more often than 50.0%" in traffic.rolled_back
    assert {await owner(made) for _ in range(20)} == {"replicas/0"}


async def test_a_canary_does_not_answer_for_what_began_under_the_weights_before_it():
    made = dispatcher(0, 0)
    made.verdicts.divisions["m"] = division(canary="v1", v0=1, v1=1)
    swapped = asyncio.Event()

    async def send(replica, _):
        await swapped.wait()
        raise ReplicaLost("died")
        yield

    async def ask():
        want = Want(model_id="m", num_tokens=10, deadline_seconds=0.0)
        async with aclosing(made.stream_group(want, send)) as items:
            return [item async for item in items]

    asked = [asyncio.create_task(ask()) for _ in range(60)]
    await asyncio.sleep(0)
    for number in (0, 1):
        made.table.heartbeat(info(number, version=1), made.clock())
        made.table.mark_lost(f"replicas/{number}")  # nothing is issued again
    swapped.set()
    assert all(isinstance(each, Exception) for each in await asyncio.gather(*asked, return_exceptions=True))
    assert made.verdicts.divisions["m"].traffic.weights == {"v0": 1, "v1": 1}


async def test_a_good_canary_keeps_its_weight():
    made = dispatcher(0, 1)
    made.verdicts.divisions["m"] = division(canary="v1", v0=1, v1=1)
    for number in range(300):
        await owner(made, failing={"replicas/0"} if number % 3 == 0 else ())
        made.table.heartbeat(info(0), made.clock())
    assert made.verdicts.divisions["m"].traffic.weights == {"v0": 1, "v1": 1}


async def test_a_replica_that_fails_again_and_again_is_spared_while_there_are_others():
    made = dispatcher(0, 0)
    now = 0.0
    made.clock = lambda: now
    for number in (0, 1):
        made.table.register(info(number), now)
    tried = Counter()

    async def send(replica, _):
        tried[replica.info.name] += 1
        if replica.info.name == "replicas/0":
            raise ReplicaLost("refused")
        yield replica.info.name

    async def ask(count):
        tried.clear()
        for _ in range(count):
            want = Want(model_id="m", num_tokens=10, deadline_seconds=10.0)
            async with aclosing(made.stream_group(want, send)) as items:
                assert [item async for item in items] == ["replicas/1"]
            made.table.heartbeat(info(0), now)
        return dict(tried)

    assert (await ask(30))["replicas/0"] == 5
    assert made.verdicts.positions(now) == {"replicas/0": Position.OPEN}
    assert await ask(10) == {"replicas/1": 10}
    now = 6.0
    assert (await ask(10))["replicas/0"] == 1, "a probe, and a longer rest"
    made.table.mark_lost("replicas/1")
    assert await owner(made) == "replicas/0", "rather than nobody"
    made.forget("replicas/0")
    assert made.verdicts.positions(now) == {}


def traffic(*arms, **fields):
    return pb.SetTrafficRequest(traffic=pb.Traffic(model_id="m", arms=arms, **fields))


async def test_traffic_is_set_seen_and_lifted_over_grpc():
    engines = {"a": FakeEngine(), "b": FakeEngine()}
    async with gateway() as door, engine_server(engines["a"]) as first, engine_server(engines["b"]) as second:
        await door.register("a", grpc_address=first, version=3)
        await door.register("b", grpc_address=second, version=3)
        arms = (
            pb.TrafficArm(name="old", weight=0, version=3, replicas=["replicas/a"]),
            pb.TrafficArm(name="new", weight=1, replicas=["replicas/b"]),
        )
        answered = await door.stub.SetTraffic(traffic(*arms), timeout=5)
        assert list(answered.traffic.arms) == list(arms)
        for number in range(4):
            await answers(door.stub.GenerateGroup(group(f"r{number}"), timeout=10))
        assert (len(engines["a"].requests), len(engines["b"].requests)) == (0, 4)
        stream = door.stub.WatchFleet(pb.WatchFleetRequest(), timeout=10)
        assert list((await stream.read()).traffic) == [answered.traffic]
        assert not (await door.stub.SetTraffic(traffic(), timeout=5)).traffic.arms
        assert not (await stream.read()).traffic
        stream.cancel()


async def test_a_canary_whose_probe_differs_from_the_learners_is_taken_back():
    async with gateway() as door:
        well = await door.register("a", grpc_address="127.0.0.1:1", version=3)
        sick = await door.register("b", grpc_address="127.0.0.1:2", version=4)
        arms = (pb.TrafficArm(name="old", weight=9, version=3), pb.TrafficArm(name="new", weight=1, version=4))
        await door.stub.SetTraffic(traffic(*arms, canary="new"), timeout=5)
        sick.health, sick.health_reason = sick.HEALTH_UNHEALTHY, "probe of epoch 7: a log-prob differs"
        for replica in (well, sick):
            await door.stub.Heartbeat(pb.HeartbeatRequest(replica=replica), timeout=5)
        stream = door.stub.WatchFleet(pb.WatchFleetRequest(), timeout=10)
        (seen,) = (await stream.read()).traffic
        stream.cancel()
        assert {arm.name: arm.weight for arm in seen.arms} == {"old": 9, "new": 0}
        assert seen.rolled_back == "new: replicas/b is unhealthy, probe of epoch 7: a log-prob differs"


BAD_TRAFFIC = [
    pb.SetTrafficRequest(),
    traffic(pb.TrafficArm(weight=1)),
    traffic(pb.TrafficArm(name="a", weight=-1)),
    traffic(pb.TrafficArm(name="a", weight=float("nan"))),
    traffic(pb.TrafficArm(name="a", weight=0)),
    traffic(pb.TrafficArm(name="a", weight=1), pb.TrafficArm(name="a", weight=1)),
    traffic(pb.TrafficArm(name="a", weight=1), canary="a"),
    traffic(pb.TrafficArm(name="a", weight=1, version=-1)),
    traffic(pb.TrafficArm(name="a", weight=1, replicas=["b"])),
]


async def test_divisions_that_divide_nothing_are_refused():
    async with gateway() as door:
        for request in BAD_TRAFFIC:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await door.stub.SetTraffic(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request
