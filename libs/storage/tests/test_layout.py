"""The object layout: any tensors survive the round trip, anything else is refused with a typed error."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_storage.errors import CorruptObject, StorageError
from reflux_storage.layout import DTYPE_BYTES, TensorSpec, build_head, parse_head
from reflux_storage.restore import read_index, read_tensors
from reflux_storage.stores import open_store
from reflux_storage.stores.folder import FolderStore
from reflux_storage.stream import TensorSource, write_tensors

specs_strategy = st.lists(
    st.builds(
        TensorSpec,
        st.text(min_size=1, max_size=8).filter(lambda name: name not in ("__metadata__", "reflux.xxh3")),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda spec: spec.name,
)


@given(specs_strategy, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_any_set_of_tensors_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec], dice: random.Random
) -> None:
    store = FolderStore(tmp_path_factory.mktemp("s"))
    sources = [TensorSource(s.name, s.dtype, s.shape, memoryview(dice.randbytes(s.size_bytes))) for s in specs]
    write_tensors(store, "k", sources)
    index = read_index(store, "k")
    assert sorted(index.specs, key=lambda s: s.name) == sorted(specs, key=lambda s: s.name)
    assert all(span.offset_bytes % DTYPE_BYTES[span.spec.dtype] == 0 for span in index.spans.values())
    targets = {source.name: bytearray(len(source.data)) for source in sources}  # type: ignore[arg-type]
    read_tensors(store, index, {name: memoryview(target) for name, target in targets.items()})
    assert targets == {source.name: source.data for source in sources}


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_random_headers_are_corrupt_and_nothing_else(text: bytes) -> None:
    with pytest.raises(CorruptObject):
        parse_head("k", struct.pack("<Q", len(text)) + text, 10_000)


@given(st.binary(max_size=300))
@settings(max_examples=40, deadline=None)
def test_random_objects_are_refused_with_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    store = open_store(f"file://{tmp_path_factory.mktemp('s')}")
    store.put_create_only("k", content)
    with pytest.raises(StorageError):
        read_index(store, "k")


def test_a_header_that_lies_about_sizes_is_corrupt() -> None:
    head = build_head([TensorSpec("t", "U8", (4,))])
    size = len(head) + 4 + 32
    assert parse_head("k", head, size)[0].spec.name == "t"
    for wrong in (size - 1, size + 1):
        with pytest.raises(CorruptObject):
            parse_head("k", head, wrong)
    for old, new in ((b"[0,4]", b"[0,5]"), (b"[4]", b"[5]"), (b'"U8"', b'"U9"'), (b"[0,4]", b"[1,5]")):
        with pytest.raises(CorruptObject):
            parse_head("k", head.replace(old, new), size)
