"""Whether a server keeps what commits rest on: several S3-like servers accept conditions and ignore them."""

from collections.abc import Callable
from uuid import uuid4

from reflux_storage.errors import AlreadyExists, PreconditionFailed, StoreUnavailable
from reflux_storage.stores.base import ObjectStore


def check_conditional_writes(store: ObjectStore, prefix: str) -> None:
    """Writes one object and removes it; raises `StoreUnavailable` when create-only or compare-and-swap is ignored."""
    key = f"{prefix}/{uuid4().hex}"
    first = store.put_create_only(key, b"1")
    try:
        _must_refuse(lambda: store.put_create_only(key, b"2"), AlreadyExists, "create-only (If-None-Match)")
        store.put_if_match(key, b"3", first.etag)
        _must_refuse(
            lambda: store.put_if_match(key, b"4", first.etag), PreconditionFailed, "compare-and-swap (If-Match)"
        )
    finally:
        store.delete(key)


def _must_refuse(write: Callable[[], object], refusal: type[Exception], what: str) -> None:
    try:
        write()
    except refusal:
        return
    raise StoreUnavailable(f"the server ignores {what}: commits would not be safe on it")
