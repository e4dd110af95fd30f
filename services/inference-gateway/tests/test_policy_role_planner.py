"""The planner's simulation against a reference of single steps, and against bounds that always hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.policy.role_planner import Group, Rates, makespan, propose

RATES = Rates(prefill_seconds_per_token=1 / 128, step_seconds=1 / 8, step_seconds_per_sequence=1 / 64, capacity=4)
# Powers of two: sums are exact, so that ties between a step's end and a prompt's arrival are ties for both.
lists_of_groups = st.lists(
    st.builds(Group, st.integers(1, 200), st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)), max_size=8
)


def by_single_steps(queue, rates):
    """One decode step at a time; slow, and plain."""
    waiting = [(r, 0 if i else h, n) for r, h, lengths in sorted(queue) for i, n in enumerate(lengths)]
    now, running = 0.0, []
    while waiting or running:
        while waiting and len(running) < rates.capacity and waiting[0][0] <= now:
            _, here, length = waiting.pop(0)
            now += here * rates.prefill_seconds_per_token
            running.append(length)
        if running:
            now += rates.step_seconds + len(running) * rates.step_seconds_per_sequence
            running = [left - 1 for left in running if left > 1]
        else:
            now = max(now, waiting[0][0])
    return now


@given(lists_of_groups)
def test_one_replica_takes_the_time_of_single_steps(groups):
    queue = [(0.0, group.prompt_tokens, group.answer_tokens) for group in groups]
    # Sorted by the planner, too: all are there at once, so that the order is by prompt length.
    assert makespan(groups, RATES, 0, 1) == pytest.approx(by_single_steps(queue, RATES))


@given(lists_of_groups)
def test_one_prefill_and_one_decode_replica_take_the_time_of_single_steps(groups):
    done, queue = 0.0, []
    for group in groups:
        done += group.prompt_tokens * RATES.prefill_seconds_per_token
        queue.append((done, 0, group.answer_tokens))
    assert makespan(groups, RATES, 1, 1) == pytest.approx(by_single_steps(queue, RATES))


@given(lists_of_groups.filter(bool), st.integers(1, 5))
@settings(deadline=None)
def test_no_division_beats_the_work_or_the_longest_answer(groups, replicas):
    step = RATES.step_seconds / RATES.capacity + RATES.step_seconds_per_sequence
    decoding = sum(map(sum, (group.answer_tokens for group in groups))) * step
    prefill = sum(group.prompt_tokens for group in groups) * RATES.prefill_seconds_per_token
    longest = max(max(group.answer_tokens) for group in groups)
    plans = propose(groups, RATES, replicas)
    assert {(one.prefill, one.decode) for one in plans} == {(at, replicas - at) for at in range(replicas)}
    assert plans[0].makespan_seconds == min(one.makespan_seconds for one in plans)
    for one in plans:
        least = longest * (RATES.step_seconds + RATES.step_seconds_per_sequence)
        least = max(least, decoding / one.decode, prefill / one.prefill if one.prefill else prefill / one.decode)
        assert one.makespan_seconds >= least * (1 - 1e-9)


def test_prefill_replicas_are_proposed_only_where_the_step_ends_sooner_with_them():
    costly_steps = Rates(
        prefill_seconds_per_token=1 / 128, step_seconds=1 / 2, step_seconds_per_sequence=1 / 512, capacity=16
    )
    proposed = set()
    for seed in range(8):
        draw = random.Random(seed)
        groups = [Group(1000, (max(1, int(200 * draw.lognormvariate(0, 0.5))),)) for _ in range(16)]
        best, *_ = propose(groups, costly_steps, 3)
        proposed.add(best.prefill > 0)
        assert (best.prefill > 0) == (best.makespan_seconds < makespan(groups, costly_steps, 0, 3))
    assert proposed == {True, False}
    assert propose([Group(20, (300,) * 4)] * 16, RATES, 4)[0].prefill == 0


def test_no_replica_is_refused():
    with pytest.raises(ValueError, match="num_replicas"):
        propose([], RATES, 0)
