import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_sandbox.jobs import (
    Grade,
    JobSpec,
    answer_keys,
    canonical_json,
    content_hash,
    grade_from_json,
    grade_to_json,
    parse_child_grades,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
documents = st.dictionaries(st.text(), json_values, max_size=4)


def spec(**changes):
    fields = {
        "verifier": "a/b",
        "version": "1",
        "fidelity": "rule",
        "payload": "{}",
        "answers": ("x", "y"),
        "deadline_seconds": 1.0,
        "run": "r",
        "traceparent": "",
    }
    return JobSpec(**(fields | changes))


@settings(max_examples=50, deadline=None)
@given(documents)
def test_equal_documents_have_one_spelling(document):
    shuffled = dict(reversed(document.items()))
    assert canonical_json(json.dumps(document)) == canonical_json(json.dumps(shuffled, indent=2))
    assert json.loads(canonical_json(json.dumps(document))) == document


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "nul", '{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', "[" * 5000, '{"a":' * 5000]
)
def test_what_is_no_finite_json_object_is_refused(text):
    with pytest.raises(ValueError):
        canonical_json(text)


def test_a_key_covers_what_can_change_a_grade_and_nothing_else():
    (base, other) = answer_keys(spec())
    assert base != other
    same = [
        spec(run="other"),
        spec(deadline_seconds=9.0),
        spec(traceparent="t"),
        spec(fidelity="full"),
        spec(priority=1),
    ]
    assert {answer_keys(job)[0] for job in same} == {base}
    different = [spec(version="2"), spec(verifier="a/c"), spec(payload='{"a":1}'), spec(answers=("xy",))]
    assert len({base, *(answer_keys(job)[0] for job in different)}) == len(different) + 1
    assert content_hash(answer_keys(spec())) != content_hash(answer_keys(spec(answers=("y", "x"))))


@given(st.lists(st.text(), min_size=1, max_size=4), st.lists(st.text(), min_size=1, max_size=4))
def test_different_answers_never_share_a_key(first, second):
    keys = [content_hash(answer_keys(spec(answers=tuple(answers)))) for answers in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


def test_grades_survive_storage():
    for grade in (Grade(outcome="scored", reward=0.1, figures={"r_wp": 1e-17}, message="m"), Grade(outcome="invalid")):
        assert grade_from_json(grade_to_json(grade).encode()) == grade


def row(**changes):
    return {"outcome": "scored", "reward": 1.0, "figures": {}, "message": ""} | changes


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        [row(), row()],
        [row(outcome="great")],
        [row(outcome="cancelled")],
        [row(reward=float("inf"))],
        [row(reward=float("nan"))],
        [row(reward="much")],
        [row(figures={"x": float("nan")})],
    ],
)
def test_malformed_grades_of_a_child_are_refused(rows):
    with pytest.raises(ValueError):
        parse_child_grades(rows, 1)


def test_half_a_surrogate_pair_in_a_grade_can_be_told():
    (grade,) = parse_child_grades([row(message="a\ud800b", figures={"\ud800": 1.0})], 1)
    assert (grade.message, grade.figures) == ("a?b", {"?": 1.0})
