import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.fleet import Fleet, FleetPaused
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable, State
from reflux_inference_gateway.retry import Attempts
from reflux_inference_gateway.routing import POLICIES
from reflux_inference_gateway.routing.base import Ask, Candidate
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.routing.round_robin import RoundRobin
from reflux_inference_gateway.wire import info_message, parse_replica

LOADS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8)


def candidates(loads):
    return [
        Candidate(name=f"replicas/{order}", inflight_tokens=tokens, dispatched=dispatched, order=order)
        for order, (tokens, dispatched) in enumerate(loads)
    ]


@given(LOADS, st.sampled_from(sorted(POLICIES)))
def test_every_policy_picks_one_of_the_candidates(loads, name):
    fleet = candidates(loads)
    assert POLICIES[name]().choose(fleet, Ask()) in {one.name for one in fleet}


@given(LOADS)
def test_least_loaded_never_takes_a_busier_replica(loads):
    fleet = candidates(loads)
    chosen = LeastLoaded().choose(fleet, Ask())
    least = min(one.inflight_tokens for one in fleet)
    assert next(one for one in fleet if one.name == chosen).inflight_tokens == least


@given(st.integers(1, 6), st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_a_burst_without_answers_spreads_within_one_request(replicas, sizes):
    table = ReplicaTable()
    for number in range(replicas):
        table.register(info(f"replicas/{number}"), 0.0)
    for size in sizes:
        chosen = LeastLoaded().choose([entry.candidate() for entry in table.routable("m")], Ask())
        table.dispatched(chosen, size)
    loads = [entry.inflight_tokens for entry in table.entries()]
    assert max(loads) - min(loads) <= max(sizes)


def test_idle_replicas_share_single_requests():
    table = ReplicaTable()
    for number in range(3):
        table.register(info(f"replicas/{number}"), 0.0)
    for _ in range(9):
        chosen = LeastLoaded().choose([entry.candidate() for entry in table.routable("m")], Ask())
        table.dispatched(chosen, 10)
        table.answered(chosen, 10)
    assert [entry.dispatched for entry in table.entries()] == [3, 3, 3]


@given(st.integers(1, 6), st.integers(1, 40))
def test_round_robin_is_fair(replicas, rounds):
    policy, fleet = RoundRobin(), candidates([(0, 0)] * replicas)
    counts = dict.fromkeys((one.name for one in fleet), 0)
    for _ in range(rounds):
        counts[policy.choose(fleet, Ask())] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


def info(name, **fields):
    return ReplicaInfo(name=name, **({"model_id": "m", "grpc_address": "a:1"} | fields))


def test_a_silent_replica_is_lost_and_a_heartbeat_brings_it_back():
    table = ReplicaTable(expiry_seconds=5, forget_seconds=60)
    table.register(info("replicas/a"), 0.0)
    assert table.expire(5.0) == []
    assert table.expire(5.1) == ["replicas/a"]
    assert table.routable("m") == []
    assert table.heartbeat(info("replicas/a", version=3), 6.0)
    assert [entry.info.version for entry in table.routable("m")] == [3]
    assert table.expire(70.0) == ["replicas/a"]
    assert table.models() == []
    assert not table.heartbeat(info("replicas/a"), 71.0)


def test_a_draining_replica_gets_nothing_and_leaves_when_it_is_empty():
    table = ReplicaTable()
    table.register(info("replicas/a"), 0.0)
    table.dispatched("replicas/a", 7)
    table.drain("replicas/a")
    assert table.heartbeat(info("replicas/a"), 0.5)
    assert table.routable("m") == []
    assert table.expire(1.0) == []
    table.answered("replicas/a", 7)
    assert table.expire(1.5) == ["replicas/a"]


def test_an_unhealthy_replica_gets_nothing_until_it_says_that_it_is_well():
    table = ReplicaTable()
    table.register(info("replicas/0"), 0.0)
    table.register(info("replicas/1", fault="its weights are a mixture"), 0.0)
    assert [entry.info.name for entry in table.routable("m")] == ["replicas/0"]
    assert table.faults("m") == ["replicas/1: its weights are a mixture"]
    table.heartbeat(info("replicas/1"), 1.0)
    table.heartbeat(info("replicas/0", fault="it computes something else"), 1.0)
    assert [entry.info.name for entry in table.routable("m")] == ["replicas/1"]


def test_health_survives_the_way_to_the_gateway_and_to_whoever_lists_replicas():
    message = ReplicaMessage(name="replicas/0", model_id="m", grpc_address="a:1", role=ReplicaMessage.ROLE_BOTH)
    assert parse_replica(message).fault == "", "a replica that says nothing counts as healthy"
    message.health, message.health_reason = ReplicaMessage.HEALTH_UNHEALTHY, "its weights are a mixture"
    listed = info_message(parse_replica(message))
    assert (listed.health, listed.health_reason) == (message.health, message.health_reason)
    message.health_reason = ""
    assert parse_replica(message).fault, "without a reason it is unhealthy all the same"


def test_routable_honours_version_door_and_exclusion():
    table = ReplicaTable()
    table.register(info("replicas/old", version=1), 0.0)
    table.register(info("replicas/new", version=2, http_url="http://x"), 0.0)
    names = lambda **want: [entry.info.name for entry in table.routable("m", **want)]  # noqa: E731
    assert names() == ["replicas/old", "replicas/new"]
    assert names(min_version=2) == ["replicas/new"]
    assert names(http=True) == ["replicas/new"]
    assert names(excluded=["replicas/new"]) == ["replicas/old"]
    table.mark_lost("replicas/old")
    assert table.get("replicas/old").state is State.LOST
    assert names() == ["replicas/new"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=120))
def test_the_ledger_balances_whatever_happens(events):
    fleet = Fleet(max_held=20)
    open_requests: list[tuple[str, bool]] = []
    for action, pick in events:
        model = f"m{pick % 3}"
        index = pick % len(open_requests) if open_requests else None
        if action == 0:
            try:
                fleet.enter(model)
                open_requests.append((model, False))
            except FleetPaused:
                assert fleet.ledger.held == 20
        elif action == 1:
            fleet.pause(model if pick % 2 else "")
        elif action == 2:
            before = fleet.ledger
            released = fleet.resume(model if pick % 2 else "")
            assert 0 <= released <= before.held
        elif index is not None:
            one, was_running = open_requests.pop(index)
            if action == 3 and not was_running:
                fleet.run(one)
                open_requests.append((one, True))
            elif action == 4 and was_running:
                fleet.hold_again(one)
                open_requests.append((one, False))
            else:
                fleet.end(one, was_running=was_running, outcome=("completed", "failed", "cancelled")[pick % 3])
        assert fleet.ledger.balanced()
        assert fleet.ledger.held + fleet.ledger.running == len(open_requests)


def test_resume_reports_what_the_pause_held():
    fleet = Fleet()
    for model in ("a", "a", "b"):
        fleet.enter(model)
    assert fleet.pause("a") == 0
    assert fleet.is_paused("a")
    assert not fleet.is_paused("b")
    fleet.pause()
    assert fleet.resume("a") == 0  # the pause of all still holds them
    assert fleet.resume() == 3


def test_a_request_moves_once_and_only_while_nothing_is_out():
    attempts = Attempts.none()
    assert attempts.may_reissue()
    attempts.tried.append("replicas/a")
    assert attempts.may_reissue()
    attempts.delivered = True
    assert not attempts.may_reissue()
    twice = Attempts(tried=["replicas/a", "replicas/b"])
    assert not twice.may_reissue()


def test_the_gateway_process_never_imports_torch():
    code = "import sys, reflux_inference_gateway.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
