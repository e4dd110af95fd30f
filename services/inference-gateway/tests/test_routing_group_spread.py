from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.routing.base import Ask, Candidate
from reflux_inference_gateway.routing.group_spread import GroupSpread, makespan
from reflux_inference_gateway.routing.least_loaded import LeastLoaded
from reflux_inference_gateway.routing.lengths import LengthBook

from .routing_simulation import mix, simulate

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True)
FLEETS = st.lists(
    st.tuples(st.just(0) | st.integers(0, 300_000), st.sampled_from([0, 1, 8, 64])), min_size=1, max_size=6
).map(lambda rows: [replica(order, tokens, capacity) for order, (tokens, capacity) in enumerate(rows)])
ASKS = st.builds(
    Ask,
    num_samples=st.integers(1, 80),
    num_prompt_tokens=st.integers(0, 4000),
    prompt=st.sampled_from([b"", b"x" * 640]),
    max_tokens=st.sampled_from([0, 16, 4096]),
    run=st.just("run"),
)


def replica(order, tokens=0, capacity=64):
    return Candidate(name=f"replicas/{order}", inflight_tokens=tokens, dispatched=0, order=order, capacity=capacity)


def planned(policy, fleet, ask):
    """The counts that the policy chose, by index, and the outlooks that it chose them by."""
    outlooks = policy.outlooks(fleet, ask, ask.prompt)
    index = {one.name: at for at, one in enumerate(fleet)}
    return outlooks, {index[share.name]: share.num_samples for share in policy.split(fleet, ask)}


@BOUNDED
@given(FLEETS, ASKS, st.lists(st.integers(0, 5000), max_size=40), st.sampled_from([0.0, 0.1, 1e9]))
def test_no_replica_alone_is_expected_to_finish_earlier(fleet, ask, lengths, max_prefill_part):
    policy = GroupSpread(max_prefill_part=max_prefill_part)
    policy.finished("replicas/0", ask, lengths)
    outlooks, counts = planned(policy, fleet, ask)
    alone = min(one.finish(ask.num_samples) for one in outlooks)
    assert makespan(outlooks, counts) <= alone * (1 + 1e-6)


@BOUNDED
@given(FLEETS, ASKS, st.lists(st.integers(0, 5000), max_size=40))
def test_no_even_split_is_expected_to_finish_earlier_when_work_is_no_concern(fleet, ask, lengths):
    policy = GroupSpread(max_prefill_part=1e9)
    policy.finished("replicas/0", ask, lengths)
    outlooks, counts = planned(policy, fleet, ask)
    size, rest = divmod(ask.num_samples, len(fleet))
    even = {at: size + (at < rest) for at in range(len(fleet)) if size + (at < rest)}
    assert makespan(outlooks, counts) <= makespan(outlooks, even) * (1 + 1e-6)


@BOUNDED
@given(FLEETS, ASKS)
def test_prompts_prefilled_again_cost_at_most_the_stated_part_of_the_groups_work(fleet, ask):
    policy = GroupSpread(max_prefill_part=0.1)
    outlooks, counts = planned(policy, fleet, ask)
    served = [outlooks[at] for at in counts]
    work = max(ask.num_samples * one.mean * one.costs.decode_per_token(one.capacity) for one in outlooks)
    assert sum(one.prefill for one in served) - max(one.prefill for one in served) <= 0.1 * work * (1 + 1e-6)


@BOUNDED
@given(FLEETS, ASKS)
def test_more_samples_never_finish_earlier(fleet, ask):
    for outlook in GroupSpread().outlooks(fleet, ask, ask.prompt):
        times = [outlook.finish(count) for count in range(90)]
        assert times == sorted(times)


def test_a_small_group_stays_whole_and_a_large_one_fans_out():
    ask = Ask(num_prompt_tokens=1000, max_tokens=2048, run="run")
    fleet = [replica(order) for order in range(4)]
    assert len(GroupSpread().split(fleet, replace(ask, num_samples=8))) == 1
    shares = GroupSpread().split(fleet, replace(ask, num_samples=64))
    assert len(shares) >= 3
    assert max(share.num_samples for share in shares) - min(share.num_samples for share in shares) <= 1


def test_a_busy_replica_gets_fewer_followers_than_an_idle_one():
    fleet = [replica(0, tokens=60_000), replica(1), replica(2)]
    ask = Ask(num_samples=96, num_prompt_tokens=200, max_tokens=2048, run="run")
    shares = {share.name: share.num_samples for share in GroupSpread().split(fleet, ask)}
    assert shares.get("replicas/0", 0) < shares["replicas/1"]
    assert abs(shares["replicas/1"] - shares["replicas/2"]) <= 1


def test_the_lead_goes_where_the_prompt_is_cached_unless_the_queue_costs_more():
    policy = GroupSpread()
    ask = Ask(prompt=tuple(range(2000)), num_prompt_tokens=2000, max_tokens=64, salt="3")
    fleet = [replica(0), replica(1)]
    assert policy.choose(fleet, ask) == "replicas/0"
    fleet = [replace(fleet[0], dispatched=1, inflight_tokens=2064), fleet[1]]
    assert policy.choose(fleet, ask) == "replicas/0", "half a prompt's time of queue is cheaper than the prompt"
    assert policy.choose(fleet, replace(ask, salt="4")) == "replicas/1", "the cache of another version is void"
    assert policy.choose([replace(fleet[0], inflight_tokens=10**6), fleet[1]], ask) == "replicas/1"
    policy.forget("replicas/0")
    policy.forget("replicas/1")
    assert policy.choose(fleet, ask) == "replicas/1"


def test_a_run_with_short_answers_stops_fanning_out():
    policy, fleet = GroupSpread(), [replica(order) for order in range(4)]
    ask = Ask(num_samples=32, num_prompt_tokens=1000, max_tokens=4096, run="short")
    assert len(policy.split(fleet, ask)) > 1
    policy.finished("replicas/0", ask, [12] * 256)
    assert len(policy.split(fleet, ask)) == 1
    assert len(policy.split(fleet, replace(ask, run="other"))) > 1


@BOUNDED
@given(st.lists(st.integers(0, 9000), max_size=300), ASKS)
def test_expected_lengths_stay_within_the_limit(lengths, ask):
    book = LengthBook()
    book.learn("run", lengths)
    expected = book.expect(ask)
    assert 1 <= expected.mean <= expected.longest
    assert expected.longest <= max(1, ask.max_tokens or max([1024, *lengths]))


def test_a_few_wild_samples_hardly_move_the_expected_length():
    book = LengthBook()
    book.learn("run", [100] * 250 + [100_000] * 3)
    assert book.expect(Ask(run="run", max_tokens=1 << 20, num_samples=1)).mean < 120
    book.learn("run", [100] * 256)
    estimates = [book.expect(Ask(run="run", max_tokens=400)).mean]
    book.learn("run", [100_000] * 3)
    estimates.append(book.expect(Ask(run="run", max_tokens=400)).mean)
    assert estimates == pytest.approx([100.0, 100.0])


def test_the_book_forgets_the_runs_that_were_silent_longest():
    book = LengthBook()
    for number in range(1000):
        book.learn(str(number), [7])
        book.learn("0", [7])
    assert len(book._runs) == 128
    assert book.expect(Ask(run="0", max_tokens=28)).mean == pytest.approx(7.0)
    assert "1" not in book._runs


def test_a_mix_of_groups_has_no_hot_spot_and_prefills_hardly_more_than_once():
    """The figures of one replica depend on luck with long samples: bars are put to means over seeds."""
    spread = [simulate(GroupSpread(), mix(seed), concurrent=68) for seed in range(8)]
    assert sum(one.hot_spot for one in spread) / len(spread) <= 1.15
    assert max(one.prefill_ratio for one in spread) <= 1.3
    whole = [simulate(LeastLoaded(), mix(seed), concurrent=68) for seed in range(8)]
    assert sum(one.makespan_seconds for one in spread) < sum(one.makespan_seconds for one in whole)
