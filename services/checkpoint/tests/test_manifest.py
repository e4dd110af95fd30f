"""Ids, names and records: what we write we read, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_checkpoint.manifest import (
    Cursor,
    DamagedRecord,
    Manifest,
    StoredObject,
    check_cursor,
    check_objects,
    decode,
    decode_manifest,
    encode,
    encode_manifest,
    make_id,
    parse_name,
)

ids = st.builds(
    make_id,
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    st.integers(0, 10**6 - 1),
    st.integers(0, 10**10 - 1),
    st.text(),
)
numbers = st.integers(0, 2**40)
cursors = st.builds(
    Cursor, numbers, numbers, numbers, numbers, numbers, numbers, st.lists(numbers).map(tuple), numbers, st.text()
)
objects = st.lists(st.builds(StoredObject, st.text(), numbers, st.text()), max_size=4).map(tuple)


@given(ids)
def test_a_name_gives_its_id_back(id) -> None:
    assert parse_name(id.name) == id


@given(ids, ids)
def test_manifest_keys_sort_by_attempt_and_then_by_step(a, b) -> None:
    assert (a.order < b.order) == ((a.attempt, a.step) < (b.attempt, b.step))


@given(ids, objects, cursors, st.floats(0, 1e10))
def test_a_manifest_survives_the_round_trip(id, stored, cursor, at) -> None:
    manifest = Manifest(id, stored, cursor, at)
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(st.binary(max_size=200))
def test_random_bytes_are_a_damaged_record(data) -> None:
    with pytest.raises(DamagedRecord):
        decode(data)


@given(st.data())
def test_a_torn_or_flipped_record_is_noticed(data) -> None:
    record = bytearray(encode({"state": "open", "since": 1.5}))
    if data.draw(st.booleans()):
        del record[data.draw(st.integers(0, len(record) - 1)) :]
    else:
        record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert decode(bytes(record)) == {"format": 1, "state": "open", "since": 1.5}  # a flip in white space or case
    except DamagedRecord:
        return


@pytest.mark.parametrize("body", [{}, {"id": 1}, {"id": {}, "objects": [], "cursor": {}, "committed_at": 1}])
def test_a_record_that_is_no_manifest_is_damaged(body) -> None:
    with pytest.raises(DamagedRecord):
        decode_manifest(encode(body))


@pytest.mark.parametrize(
    "name", ["", "x", "checkpoints/r", "checkpoints/r/1", "checkpoints/../000001-0000000001-" + "0" * 16, "a/b/c/d"]
)
def test_other_names_are_refused(name) -> None:
    with pytest.raises(ValueError, match="want"):
        parse_name(name)


def test_objects_outside_the_contract_are_refused_by_name() -> None:
    good = StoredObject("p/a", 1, "0" * 32)
    check_objects("p", (good,))
    for objects, complaint in (
        ((), "at least one"),
        ((good, good), "same key"),
        ((StoredObject("q/a", 1, "0" * 32),), "not below"),
        ((StoredObject("p", 1, "0" * 32),), "not below"),
        ((StoredObject("p/a", 0, "0" * 32),), "empty"),
        ((StoredObject("p/a", 1, "F" * 32),), "checksum"),
    ):
        with pytest.raises(ValueError, match=complaint):
            check_objects("p", objects)


def test_cursors_that_no_loop_can_be_at_are_refused_by_field() -> None:
    check_cursor(Cursor(1, 2, 3, 4, 10, 5, (6, 9), 7, "f"))
    for cursor, field in (
        (Cursor(-1, 0, 0, 0, 0, 0, (), 0, ""), "cursor.step"),
        (Cursor(0, 0, 0, 0, 1, 2, (), 0, ""), "cursor.low_water_index"),
        (Cursor(0, 0, 0, 0, 5, 2, (1,), 0, ""), "cursor.closed_prompts"),
        (Cursor(0, 0, 0, 0, 5, 2, (5,), 0, ""), "cursor.closed_prompts"),
        (Cursor(0, 0, 0, 0, 5, 2, (3, 3), 0, ""), "cursor.closed_prompts"),
    ):
        with pytest.raises(ValueError, match=field):
            check_cursor(cursor)
