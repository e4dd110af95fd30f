"""The pure parts of the door: edits, shadows, headers, trajectories."""

import json
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_inference_gateway.http import edits
from reflux_inference_gateway.http.headers import end_to_end
from reflux_inference_gateway.http.hints import Hints, read_hints
from reflux_inference_gateway.http.shadow import read_shadow
from reflux_inference_gateway.http.trajectories import Trajectories

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text() | st.sampled_from(["cache_salt", "extra_key"]), VALUES, max_size=6)


@given(BODIES, st.sampled_from(["torch", "vllm", "sglang", ""]), st.integers(0, 99), st.sampled_from([None, 3]))
@settings(max_examples=100, deadline=None)
def test_an_edited_body_is_the_sent_one_plus_the_edits(fields, engine, version, indent):
    raw = b"  " + json.dumps(fields, indent=indent).encode()
    wanted = edits.salt(engine, version)
    edited = json.loads(edits.apply(raw, fields, wanted))
    salts = {edit.field: edit.value for edit in wanted}
    assert edited == fields | {
        field: value if fields.get(field) is None else f"{value}/{fields[field]}" for field, value in salts.items()
    }
    assert len(wanted) == (engine in ("vllm", "sglang"))


def test_every_kind_of_prompt_has_an_estimate_and_a_key():
    for fields, tokens, key in (
        ({"prompt": "x" * 40, "max_tokens": 5, "n": 3}, 11 + 15, b"x" * 40),
        ({"prompt": [7, 8, 9], "max_tokens": 5}, 3 + 5, array("I", [7, 8, 9]).tobytes()),
        ({"prompt": [[7], [8, 9]], "max_tokens": 5}, 3 + 5, b"[[7],[8,9]]"),
        ({"messages": [{"content": "x" * 40}], "max_completion_tokens": 2}, 11 + 2, None),
        ({"messages": [{"content": [{"text": "x" * 8}]}, 3, None], "max_tokens": 2}, 3 + 1 + 2, None),
        ({"input": "x" * 8, "max_output_tokens": 4}, 3 + 4, b"x" * 8),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "n": 2}}, 2 + 8, array("I", [1, 2]).tobytes()),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 4}}, 1 + 4, array("I", [1]).tobytes()),
        ({"prompt": [7, -1, "x"], "max_tokens": 1}, 3 + 1, b""),
        ({"max_tokens": -4}, 256, b""),
    ):
        shadow = read_shadow(json.dumps({"model": "m", **fields}).encode())
        assert shadow.num_tokens == tokens, fields
        assert key in (None, shadow.prompt_key()), fields


def test_hints_are_read_from_their_headers_only():
    headers = [(b"x-reflux-min-version", b"3"), (b"x-reflux-max-lag", b"0"), (b"x-reflux-version", b"4")]
    headers += [(b"x-reflux-session", b"t/1"), (b"x-reflux-new", b"?"), (b"min-version", b"9")]
    assert read_hints(headers) == Hints(min_version=3, max_lag=0, version=4, session="t/1")
    assert read_hints([]) == Hints()


def test_headers_named_by_connection_stay_behind():
    sent = [(b"a", b"1"), (b"connection", b"close, B"), (b"b", b"2"), (b"te", b"x"), (b"a", b"3")]
    assert end_to_end(sent) == [(b"a", b"1"), (b"a", b"3")]


def test_a_trajectory_keeps_its_first_version_and_the_oldest_is_forgotten():
    kept = Trajectories(max_trajectories=2)
    assert [kept.started("m", "a", 1), kept.started("m", "b", 2), kept.started("m", "a", 3)] == [1, 2, 1]
    assert [kept.started("n", "a", 4), kept.started("m", "a", 5), kept.started("m", "b", 6)] == [4, 1, 6]
