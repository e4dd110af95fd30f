from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.routing import POLICIES
from reflux_inference_gateway.routing.base import Ask, Candidate
from reflux_inference_gateway.routing.power_of_two import PowerOfTwo
from reflux_inference_gateway.routing.prefix import Prefix
from reflux_inference_gateway.routing.session import Session

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = st.sampled_from(sorted(POLICIES))
ASKS = st.builds(
    Ask,
    num_samples=st.sampled_from([1, 2, 7, 64]),
    prompt=st.one_of(st.binary(max_size=200), st.lists(st.integers(0, 2), max_size=60).map(tuple)),
    num_prompt_tokens=st.sampled_from([0, 50, 3000]),
    max_tokens=st.sampled_from([0, 1, 2048]),
    session=st.sampled_from(["", "a", "b"]),
    run=st.sampled_from(["", "run"]),
    salt=st.sampled_from(["1", "2"]),
)


@st.composite
def fleets(draw, min_size=1):
    rows = st.tuples(st.sampled_from([0, 10, 5000, 10**6]), st.integers(0, 9), st.integers(0, 40), st.integers(0, 64))
    return [
        Candidate(
            name=f"replicas/{order}",
            inflight_tokens=tokens,
            dispatched=dispatched,
            order=order,
            capacity=capacity,
            inflight_requests=requests,
        )
        for order, (tokens, dispatched, requests, capacity) in enumerate(
            draw(st.lists(rows, min_size=min_size, max_size=7))
        )
    ]


def idle(count):
    return [Candidate(name=f"replicas/{order}", inflight_tokens=0, dispatched=0, order=order) for order in range(count)]


STEPS = st.lists(st.tuples(fleets(), ASKS, st.lists(st.integers(0, 3000), max_size=5)), min_size=1, max_size=6)


@BOUNDED
@given(NAMES, STEPS)
def test_shares_are_of_candidates_and_sum_to_the_group_and_repeat(name, steps):
    one, other = POLICIES[name](), POLICIES[name]()
    for fleet, ask, lengths in steps:
        shares = one.split(fleet, ask)
        assert shares == other.split(fleet, ask), "a choice is a function of what the policy was told"
        names = [share.name for share in shares]
        assert set(names) <= {candidate.name for candidate in fleet}
        assert len(set(names)) == len(names)
        assert min(share.num_samples for share in shares) >= 1
        assert sum(share.num_samples for share in shares) == ask.num_samples
        chosen = one.choose(fleet, ask)
        assert chosen == other.choose(fleet, ask)
        assert chosen in {candidate.name for candidate in fleet}
        for policy in (one, other):
            policy.finished(chosen, ask, lengths)
            policy.forget(names[0])


@BOUNDED
@given(NAMES, st.integers(2, 6))
def test_no_policy_starves_a_replica(name, replicas):
    policy, fleet = POLICIES[name](), idle(replicas)
    for number in range(40 * replicas):
        ask = Ask(prompt=(number,) * 64, num_prompt_tokens=64, max_tokens=10, session=str(number))
        chosen = policy.choose(fleet, ask)
        fleet = [
            replace(
                one,
                inflight_tokens=one.inflight_tokens + 74,
                dispatched=one.dispatched + 1,
                inflight_requests=one.inflight_requests + 1,
            )
            if one.name == chosen
            else one
            for one in fleet
        ]
    assert min(one.dispatched for one in fleet) >= 10


@BOUNDED
@given(fleets(min_size=2), st.integers(0, 9))
def test_power_of_two_never_takes_the_single_busiest_replica(fleet, seed):
    busiest = sorted(fleet, key=lambda one: one.inflight_tokens)[-1]
    chosen = PowerOfTwo(seed).choose(fleet, Ask())
    taken = next(one for one in fleet if one.name == chosen)
    assert taken is not busiest or any(one.inflight_tokens == busiest.inflight_tokens for one in fleet if one != taken)


@BOUNDED
@given(st.lists(st.tuples(fleets(), ASKS), min_size=1, max_size=12))
def test_a_prefix_never_wins_on_a_replica_beyond_the_load_bound(steps):
    policy = Prefix(max_lead_tokens=100, max_ratio=1.5)
    for fleet, ask in steps:
        chosen = policy.choose(fleet, ask)
        load = next(one for one in fleet if one.name == chosen).inflight_tokens
        least = min(one.inflight_tokens for one in fleet)
        assert load <= max(least + 100, 1.5 * least)


def test_a_prefix_is_followed_until_its_replica_is_too_busy_or_forgotten():
    policy, ask = Prefix(max_lead_tokens=100), Ask(prompt=b"p" * 640, salt="1")
    fleet = idle(3)
    first = policy.choose(fleet, ask)
    busier = [replace(one, inflight_tokens=90 if one.name == first else 0) for one in fleet]
    assert policy.choose(busier, replace(ask, prompt=b"p" * 640 + b"q" * 200)) == first
    assert policy.choose(busier, replace(ask, salt="2")) != first, "another version's cache is no match"
    assert policy.choose(busier, replace(ask, prompt=b"p" * 64 + b"x" * 640)) != first, "a short match does not count"
    policy.forget(first)
    assert policy.choose(busier, ask) != first
    policy = Prefix(max_lead_tokens=100)
    assert policy.choose(fleet, ask) == first
    assert (
        policy.choose([replace(one, inflight_tokens=101) if one.name == first else one for one in fleet], ask) != first
    )


@BOUNDED
@given(st.integers(2, 7), st.data())
def test_a_session_moves_only_when_its_replica_leaves(replicas, data):
    policy, fleet = Session(), idle(replicas)
    before = {key: policy.choose(fleet, Ask(session=key)) for key in map(str, range(60))}
    gone = data.draw(st.sampled_from(fleet)).name
    left = [one for one in fleet if one.name != gone]
    for key, home in before.items():
        now = policy.choose(left, Ask(session=key))
        assert now == home if home != gone else now != gone


def test_a_new_replica_takes_about_its_part_of_the_sessions():
    policy, keys = Session(), [str(number) for number in range(1000)]
    before = {key: policy.choose(idle(4), Ask(session=key)) for key in keys}
    after = {key: policy.choose(idle(5), Ask(session=key)) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {"replicas/4"}
    assert 150 <= len(moved) <= 250


@BOUNDED
@given(fleets(), st.text(min_size=1, max_size=5))
def test_a_session_never_goes_beyond_the_bounded_load(fleet, key):
    policy = Session(balance=1.25, min_requests=1)
    chosen = policy.choose(fleet, Ask(session=key))
    load = next(one for one in fleet if one.name == chosen).inflight_requests
    total = sum(one.inflight_requests for one in fleet)
    assert load + 1 <= 1.25 * (total + 1) / len(fleet) + 1


def test_requests_without_a_session_do_not_all_go_where_the_empty_key_hashes_to():
    policy, fleet = Session(), idle(3)
    for order in range(3):
        busy = [replace(one, inflight_tokens=0 if one.order == order else 9) for one in fleet]
        assert policy.choose(busy, Ask()) == f"replicas/{order}"


def test_a_stuck_replica_loses_sessions_and_the_others_keep_theirs():
    policy, fleet = Session(), idle(4)
    homes = {key: policy.choose(fleet, Ask(session=key)) for key in map(str, range(100))}
    stuck = [replace(one, inflight_requests=50 if one.order == 0 else 3) for one in fleet]
    for key, home in homes.items():
        now = policy.choose(stuck, Ask(session=key))
        assert now != "replicas/0"
        assert home in (now, "replicas/0")
