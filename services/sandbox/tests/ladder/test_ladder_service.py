"""The gRPC face of the ladders over a real server, real children and a real Valkey."""

import asyncio
import json
import math
import random
import uuid

import grpc
import pytest
import pytest_asyncio

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification
from reflux_kit.channel import open_channel
from reflux_kit.errors import reason_of
from reflux_kit.server import running
from reflux_sandbox.main import build
from reflux_sandbox.settings import SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["LadderService"].methods]
EASY = {"trust_least_pairs": 2, "value_of_information": False}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(namespaces, valkey_url, here):
    settings = SandboxSettings(
        listen="127.0.0.1:0",
        redis_url=valkey_url.replace("/0", "/2"),
        graders="sample_graders",
        import_folders=(here,),
        idle_children=2,
        child_memory_bytes=512 << 20,
        drain_seconds=0,
    )
    async with build(settings) as service, running(service, settings) as bound, open_channel(bound.grpc) as opened:
        yield opened


@pytest.fixture
def stub(channel):
    return LadderServiceStub(channel)


@pytest.fixture
def run():
    return f"run-{uuid.uuid4().hex[:8]}"


def creation(run, group="7", answers=("0", "00", "00"), **changes):
    fields = {
        "request_id": str(uuid.uuid4()),
        "run": run,
        "group": group,
        "payload": json.dumps({"of": run, "group": group}).encode(),
        "answers": answers,
        "sample_ids": [f"{group}/{number}" for number in range(len(answers))],
        "rule_verifier": "test/length",
        "surrogate_verifier": "test/slow",
        "full_verifier": "test/native",
        "policy": pb.LadderPolicy(**EASY),
    }
    return pb.CreateLadderRequest(**(fields | changes))


async def until_settled(stub, name):
    async with asyncio.timeout(60):
        while True:
            ladder = (await stub.GetLadder(pb.GetLadderRequest(name=name))).ladder
            if ladder.state == pb.Ladder.STATE_SETTLED:
                return ladder
            await asyncio.sleep(0.02)


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_watcher_sees_the_release_its_corrections_and_the_settlement(stub, run):
    watch = stub.WatchLadders(pb.WatchLaddersRequest(run=run))
    await watch.initial_metadata()
    first = (await stub.CreateLadder(creation(run, "1"))).ladder
    event = await asyncio.wait_for(watch.read(), 60)
    assert event.release.fidelity == Verification.FIDELITY_FULL  # nothing is trusted yet
    assert [grade.reward for grade in event.release.grades] == [1.0, 2.0, 2.0]
    assert (await asyncio.wait_for(watch.read(), 60)).WhichOneof("event") == "settlement"
    watch.cancel()
    assert (await until_settled(stub, first.name)).released_on == Verification.FIDELITY_FULL

    second = (await stub.CreateLadder(creation(run, "2"))).ladder
    ladder = await until_settled(stub, second.name)
    assert ladder.released_on == Verification.FIDELITY_SURROGATE
    assert [sample.settled_reward for sample in ladder.samples] == [1.0, 2.0, 2.0]
    assert ladder.samples[1].full.outcome == Grade.OUTCOME_SCORED
    again = stub.WatchLadders(pb.WatchLaddersRequest(run=run, resume_token="0-0"))
    events = [await asyncio.wait_for(again.read(), 60) for _ in range(7)]
    again.cancel()
    assert [event.WhichOneof("event") for event in events[2:]] == ["release", *["correction"] * 3, "settlement"]
    resumed = stub.WatchLadders(pb.WatchLaddersRequest(run=run, resume_token=events[-2].resume_token))
    assert (await asyncio.wait_for(resumed.read(), 60)).settlement == events[-1].settlement
    resumed.cancel()
    calibration = await stub.GetCalibration(pb.GetCalibrationRequest(run=run))
    assert (calibration.trusted, calibration.pairs, calibration.bias) == (True, 4, 0.0)
    assert calibration.rank_correlation == pytest.approx(1.0)
    assert (calibration.groups_open, calibration.groups_settled, calibration.coverage) == (0, 2, 1.0)
    assert calibration.cpu_seconds > 0


async def test_a_repeated_request_finds_the_same_ladder_and_a_cancelled_one_is_settled(stub, run):
    request = creation(run, answers=("5", "6"))
    name = (await stub.CreateLadder(request)).ladder.name
    assert (await stub.CreateLadder(request)).ladder.name == name
    cancelled = (await stub.CancelLadder(pb.CancelLadderRequest(name=name))).ladder
    assert cancelled.state == pb.Ladder.STATE_SETTLED
    assert {sample.skipped for sample in cancelled.samples} == {"cancelled"}
    assert not any(sample.HasField("settled_reward") for sample in cancelled.samples)
    assert (await stub.CancelLadders(pb.CancelLaddersRequest(run=run))).cancelled == 0


async def test_a_run_without_ladders_has_an_empty_calibration(stub, run):
    calibration = await stub.GetCalibration(pb.GetCalibrationRequest(run=run))
    assert (calibration.pairs, calibration.trusted) == (0, False)
    assert math.isnan(calibration.bias)


BAD = {
    "no request id": {"request_id": ""},
    "no group": {"group": ""},
    "no answers": {"answers": [], "sample_ids": []},
    "fewer ids than answers": {"sample_ids": ["a"]},
    "an id twice": {"sample_ids": ["a", "a", "b"]},
    "no full rung": {"full_verifier": ""},
    "a surrogate in the full rung": {"full_verifier": "test/slow"},
    "a release on a rung that is not there": {"surrogate_verifier": ""},
    "payload that is no JSON": {"payload": b"{"},
    "payload that is no UTF-8": {"payload": b'{"a": "\xff"}'},
    "trust that leaves above where it enters": {"policy": pb.LadderPolicy(trust_enter=0.1, trust_leave=0.2)},
    "an audit of nothing": {"policy": pb.LadderPolicy(audit_share=0.0)},
    "a correlation that is no number": {"policy": pb.LadderPolicy(trust_enter=float("nan"))},
    "a negative budget": {"policy": pb.LadderPolicy(budget_cpu_seconds=-1.0)},
    "a budget that is no number": {"policy": pb.LadderPolicy(budget_cpu_seconds=float("nan"))},
    "an error that is no number": {"policy": pb.LadderPolicy(tolerated_error=float("nan"))},
    "pairs without end": {"policy": pb.LadderPolicy(trust_least_pairs=float("inf"))},
    "a deadline in the past": {"deadline_seconds": -1.0},
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_ladder_is_refused_and_nothing_is_stored(stub, run, name):
    error = await refusal(stub.CreateLadder(creation(run, **BAD[name])))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert (await stub.GetCalibration(pb.GetCalibrationRequest(run=run))).groups_open == 0


async def test_unknown_names_are_not_found(stub, run):
    error = await refusal(stub.CreateLadder(creation(run, surrogate_verifier="test/nothing")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    missing = pb.GetLadderRequest(name="ladders/" + "0" * 32)
    assert (await refusal(stub.GetLadder(missing))).code() is grpc.StatusCode.NOT_FOUND
    traversal = pb.GetLadderRequest(name="ladders/../open")
    assert (await refusal(stub.GetLadder(traversal))).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS)
async def test_empty_and_random_requests_get_a_status(channel, caplog, method):
    path = f"/reflux.sandbox.v1.LadderService/{method}"
    dice = random.Random(method)
    allowed = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    for raw in [b"", *(dice.randbytes(dice.randrange(1, 200)) for _ in range(8))]:
        opened = channel.unary_stream if method == "WatchLadders" else channel.unary_unary
        assert await opened(path)(raw, timeout=20).code() in allowed
    assert "Traceback" not in caplog.text
