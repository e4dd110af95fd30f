"""Retention never costs the states that a run could need."""

from hypothesis import given
from hypothesis import strategies as st

from reflux_checkpoint.manifest import make_id
from reflux_checkpoint.retention import Held, RetentionPolicy, expendable

histories = st.lists(st.booleans(), max_size=20).map(
    lambda intact: [Held(make_id("r", 1, 100 - i, ""), good) for i, good in enumerate(intact)]
)
policies = st.builds(RetentionPolicy, keep_last=st.integers(1, 5), keep_every_steps=st.integers(0, 10))


@given(histories, policies)
def test_the_newest_intact_ones_and_the_permanent_ones_stay(history, policy) -> None:
    gone = set(expendable(history, policy))
    intact = [held.id for held in history if held.intact]
    assert not gone & set(intact[: policy.keep_last])
    every = policy.keep_every_steps
    assert not gone & {id for id in intact if every and id.step % every == 0}


@given(histories, policies)
def test_everything_else_behind_them_goes_oldest_first(history, policy) -> None:
    gone = expendable(history, policy)
    assert gone == sorted(gone, key=lambda id: id.step)
    left = [held for held in history if held.id not in gone]
    every = policy.keep_every_steps
    optional = [held for held in left if held.intact and not (every and held.id.step % every == 0)]
    assert len(optional) <= policy.keep_last


def test_damage_in_front_is_kept_for_a_person_and_counts_for_nothing() -> None:
    ids = [make_id("r", 1, step, "") for step in (5, 4, 3, 2, 1)]
    history = [Held(id, intact) for id, intact in zip(ids, (False, True, False, True, True), strict=True)]
    assert expendable(history, RetentionPolicy(keep_last=2)) == [ids[4]]
