"""Servers that accept conditional writes and ignore the condition are found out."""

from pathlib import Path

import pytest

from reflux_storage.errors import StoreUnavailable
from reflux_storage.promises import check_conditional_writes
from reflux_storage.stores.base import ObjectInfo, ObjectStore
from reflux_storage.stores.folder import FolderStore


class IgnoresIfNoneMatch(FolderStore):
    def put_create_only(self, key: str, data: bytes | memoryview) -> ObjectInfo:
        super().delete(key)
        return super().put_create_only(key, data)


class IgnoresIfMatch(FolderStore):
    def put_if_match(self, key: str, data: bytes | memoryview, etag: str) -> ObjectInfo:
        return super().put_if_match(key, data, self.head(key).etag)


def test_a_store_that_keeps_its_promises_passes_and_stays_empty(store: ObjectStore) -> None:
    check_conditional_writes(store, "probe")
    assert list(store.list("")) == []


@pytest.mark.parametrize(("kind", "condition"), [(IgnoresIfNoneMatch, "If-None-Match"), (IgnoresIfMatch, "If-Match")])
def test_an_ignored_condition_is_named(tmp_path: Path, kind: type[FolderStore], condition: str) -> None:
    store = kind(tmp_path)
    with pytest.raises(StoreUnavailable, match=condition):
        check_conditional_writes(store, "probe")
    assert list(store.list("")) == []
