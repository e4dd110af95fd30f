"""What every store promises, against each mechanism."""

import threading

import pytest

from reflux_storage.errors import AlreadyExists, InvalidKey, InvalidPart, NotFound, PreconditionFailed, StoreUnavailable
from reflux_storage.stores.base import MIN_PART_BYTES, ObjectStore


def test_a_created_object_is_read_back_whole_and_by_range(store: ObjectStore) -> None:
    info = store.put_create_only("run/a.bin", b"0123456789")
    data, found = store.get("run/a.bin")
    assert data == b"0123456789"
    assert found == info == store.head("run/a.bin")
    assert info.size_bytes == 10
    piece = bytearray(4)
    store.get_range("run/a.bin", 3, memoryview(piece))
    assert piece == b"3456"


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put_create_only("empty", b"")
    assert store.get("empty")[0] == b""


def test_create_only_never_replaces(store: ObjectStore) -> None:
    store.put_create_only("k", b"first")
    with pytest.raises(AlreadyExists):
        store.put_create_only("k", b"second")
    assert store.get("k")[0] == b"first"


def test_exactly_one_of_many_creators_wins(store: ObjectStore) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            store.put_create_only("race", b"%d" % number)
            won.append(number)
        except AlreadyExists:
            return

    threads = [threading.Thread(target=create, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.get("race")[0] == b"%d" % won[0]


def test_compare_and_swap_needs_the_present_etag(store: ObjectStore) -> None:
    first = store.put_create_only("latest", b"1")
    second = store.put_if_match("latest", b"2", first.etag)
    assert second.etag != first.etag
    with pytest.raises(PreconditionFailed):
        store.put_if_match("latest", b"3", first.etag)
    assert store.get("latest") == (b"2", second)


def test_compare_and_swap_of_a_missing_object_is_refused(store: ObjectStore) -> None:
    with pytest.raises(PreconditionFailed):
        store.put_if_match("nothing", b"1", '"0-0"')
    with pytest.raises(NotFound):
        store.head("nothing")


def test_a_counter_under_compare_and_swap_loses_no_increment(store: ObjectStore) -> None:
    store.put_create_only("counter", b"0")

    def increment() -> None:
        for _ in range(5):
            while True:
                data, info = store.get("counter")
                try:
                    store.put_if_match("counter", b"%d" % (int(data) + 1), info.etag)
                    break
                except PreconditionFailed:
                    continue

    threads = [threading.Thread(target=increment) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.get("counter")[0] == b"10"


def test_missing_objects_and_ranges_beyond_the_end_are_not_found(store: ObjectStore) -> None:
    for call in (store.get, store.head):
        with pytest.raises(NotFound):
            call("no/such")
    store.put_create_only("short", b"abc")
    for offset in (1, 3, 100):
        with pytest.raises(NotFound):
            store.get_range("short", offset, memoryview(bytearray(3)))


def test_list_is_sorted_and_honours_the_prefix(store: ObjectStore) -> None:
    for key in ("r/b/2", "r/a", "r/b/1", "q/z", "rr"):
        store.put_create_only(key, key.encode())
    assert [info.key for info in store.list("r/")] == ["r/a", "r/b/1", "r/b/2"]
    assert [info.key for info in store.list("r/b")] == ["r/b/1", "r/b/2"]
    assert [info.key for info in store.list("")] == ["q/z", "r/a", "r/b/1", "r/b/2", "rr"]
    assert list(store.list("none/")) == []
    assert next(iter(store.list("rr"))) == store.head("rr")


def test_delete_is_idempotent_and_frees_the_key(store: ObjectStore) -> None:
    store.put_create_only("d/e/f", b"1")
    store.delete("d/e/f")
    store.delete("d/e/f")
    store.put_create_only("d/e/f", b"2")
    assert store.get("d/e/f")[0] == b"2"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/..", ".hidden", "a b", "a\n", "\u00e4", "x" * 900])
def test_keys_that_no_store_should_see_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidKey):
        store.put_create_only(key, b"")
    with pytest.raises(InvalidKey):
        store.get(key)


def test_a_multipart_object_appears_only_when_complete(store: ObjectStore) -> None:
    upload = store.begin("big", MIN_PART_BYTES)
    last = store.put_part(upload, 2, b"end")
    first = store.put_part(upload, 1, b"x" * MIN_PART_BYTES)
    with pytest.raises(NotFound):
        store.head("big")
    assert list(store.list("")) == []
    assert [(u.key, u.touched_seconds > 0) for u in store.list_uploads("b")] == [("big", True)]
    info = store.complete_create_only(upload, [first, last])
    assert info == store.head("big")
    assert info.size_bytes == MIN_PART_BYTES + 3
    tail = bytearray(5)
    store.get_range("big", MIN_PART_BYTES - 2, memoryview(tail))
    assert tail == b"xxend"
    assert list(store.list_uploads("")) == []


def test_a_multipart_object_never_replaces(store: ObjectStore) -> None:
    upload = store.begin("k", MIN_PART_BYTES)
    part = store.put_part(upload, 1, b"late")
    store.put_create_only("k", b"early")
    with pytest.raises(AlreadyExists):
        store.complete_create_only(upload, [part])
    assert store.get("k")[0] == b"early"
    store.abort(upload.key, upload.upload_id)
    assert list(store.list_uploads("")) == []


def test_completing_twice_after_a_lost_response_is_found_out(store: ObjectStore) -> None:
    upload = store.begin("k", MIN_PART_BYTES)
    part = store.put_part(upload, 1, b"data")
    store.complete_create_only(upload, [part])
    try:
        again = store.complete_create_only(upload, [part])
    except (AlreadyExists, NotFound):
        again = store.head("k")
    assert again == store.head("k")


def test_an_aborted_upload_takes_no_part_and_leaves_nothing(store: ObjectStore) -> None:
    upload = store.begin("k", MIN_PART_BYTES)
    store.put_part(upload, 1, b"data")
    store.abort(upload.key, upload.upload_id)
    store.abort(upload.key, upload.upload_id)
    # S3 answers NoSuchUpload; moto fails inside, which is StoreUnavailable.
    with pytest.raises((NotFound, StoreUnavailable)):
        store.put_part(upload, 1, b"data")
    assert list(store.list_uploads("")) == []


def test_uploads_found_by_listing_can_be_aborted(store: ObjectStore) -> None:
    store.begin("a/k", MIN_PART_BYTES)
    found = list(store.list_uploads("a/"))
    assert [upload.key for upload in found] == ["a/k"]
    store.abort(found[0].key, found[0].upload_id)
    assert list(store.list_uploads("")) == []


def test_parts_outside_the_contract_are_refused(store: ObjectStore) -> None:
    with pytest.raises(InvalidPart):
        store.begin("k", 100)
    upload = store.begin("k", MIN_PART_BYTES)
    for number, size in ((0, 1), (10_001, 1), (1, 0), (1, MIN_PART_BYTES + 1)):
        with pytest.raises(InvalidPart):
            store.put_part(upload, number, b"x" * size)
    part = store.put_part(upload, 2, b"x")
    for parts in ([], [part]):
        with pytest.raises(InvalidPart):
            store.complete_create_only(upload, parts)


def test_check_accepts_a_store_that_works(store: ObjectStore) -> None:
    store.check()
