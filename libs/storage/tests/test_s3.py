"""What only S3 can do to us: lost responses, conflicts, and servers or buckets that are not there."""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, ResponseStreamingError

from reflux_storage.errors import AlreadyExists, PreconditionFailed, StoreUnavailable
from reflux_storage.stores import open_store
from reflux_storage.stores.base import MIN_PART_BYTES
from reflux_storage.stores.options import S3Options
from reflux_storage.stores.s3 import S3Store


@pytest.fixture
def s3(s3_url: str, s3_options: S3Options) -> S3Store:
    store = open_store(s3_url, s3_options)
    assert isinstance(store, S3Store)
    return store


def sent_twice(call: Callable[..., Any]) -> Callable[..., Any]:
    """The client's own retry after a lost response: the first answer never arrives."""

    def twice(**arguments: Any) -> Any:
        call(**arguments)
        return call(**arguments)

    return twice


def test_a_create_whose_response_was_lost_counts_as_done(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3._client, "put_object", sent_twice(s3._client.put_object))
    info = s3.put_create_only("k", b"mine")
    assert s3.get("k") == (b"mine", info)
    with pytest.raises(AlreadyExists):
        s3.put_create_only("k", b"other")


def test_a_swap_whose_response_was_lost_counts_as_done(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = s3.put_create_only("k", b"1")
    monkeypatch.setattr(s3._client, "put_object", sent_twice(s3._client.put_object))
    second = s3.put_if_match("k", b"2", first.etag)
    assert s3.get("k") == (b"2", second)
    with pytest.raises(PreconditionFailed):
        s3.put_if_match("k", b"3", first.etag)


def test_a_completion_whose_response_was_lost_counts_as_done(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = sent_twice(s3._client.complete_multipart_upload)
    monkeypatch.setattr(s3._client, "complete_multipart_upload", twice)
    upload = s3.begin("k", MIN_PART_BYTES)
    info = s3.complete_create_only(upload, [s3.put_part(upload, 1, b"data")])
    assert s3.head("k") == info


def test_a_conflicting_write_is_tried_again(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, answers = s3._client.put_object, iter([True, False])

    def conflicting(**arguments: Any) -> Any:
        if next(answers):
            raise ClientError({"Error": {"Code": "ConditionalRequestConflict"}}, "PutObject")
        return put(**arguments)

    monkeypatch.setattr(s3._client, "put_object", conflicting)
    s3.put_create_only("k", b"1")
    assert s3.get("k")[0] == b"1"


def test_a_missing_bucket_is_unavailable_and_not_empty(s3_options: S3Options) -> None:
    store = open_store("s3://no-such-bucket", s3_options)
    for call in (
        store.check,
        lambda: store.get("k"),
        lambda: list(store.list("")),
        lambda: store.put_create_only("k", b""),
    ):
        with pytest.raises(StoreUnavailable, match="no such bucket"):
            call()


def test_a_server_that_is_away_is_named(s3_options: S3Options) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = open_store("s3://bucket", replace(s3_options, endpoint=endpoint, attempts=1))
        for call in (store.check, lambda: store.get("k"), lambda: store.put_create_only("k", b"")):
            with pytest.raises(StoreUnavailable, match=endpoint):
                call()


@pytest.mark.parametrize("endpoint", ["not an address", "ftp//x"])
def test_a_malformed_endpoint_is_unavailable(s3_options: S3Options, endpoint: str) -> None:
    with pytest.raises(StoreUnavailable, match="endpoint"):
        open_store("s3://bucket", replace(s3_options, endpoint=endpoint))


class BreakingBody:
    """A response body that delivers a few bytes and then breaks, as often as it is asked to."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._left = 3

    def readinto(self, view: memoryview) -> int:
        if not self._left:
            raise ResponseStreamingError(error="connection reset")
        count = self._body.readinto(view[: self._left])
        self._left -= count
        return count


@pytest.mark.parametrize(("breaks", "arrives"), [(2, True), (3, False)])
def test_a_body_that_breaks_is_continued_a_few_times(
    s3: S3Store, monkeypatch: pytest.MonkeyPatch, breaks: int, arrives: bool
) -> None:
    s3.put_create_only("k", b"0123456789")
    get, ranges = s3._client.get_object, []

    def breaking(**arguments: Any) -> Any:
        ranges.append(arguments["Range"])
        answer = get(**arguments)
        return {**answer, "Body": BreakingBody(answer["Body"]) if len(ranges) <= breaks else answer["Body"]}

    monkeypatch.setattr(s3._client, "get_object", breaking)
    target = bytearray(10)
    if not arrives:
        with pytest.raises(StoreUnavailable):
            s3.get_range("k", 0, memoryview(target))
        return
    s3.get_range("k", 0, memoryview(target))
    assert target == b"0123456789"
    assert ranges == ["bytes=0-9", "bytes=3-9", "bytes=6-9"]
