"""Tensors to an object and back: exact, verified, readable by safetensors, refused when anything differs."""

import random
import threading
import tracemalloc
from pathlib import Path

import pytest

from reflux_storage.errors import AlreadyExists, CorruptObject, NotFound, StoreUnavailable
from reflux_storage.layout import TensorSpec
from reflux_storage.restore import find_damage, read_index, read_tensors
from reflux_storage.stores.base import MIN_PART_BYTES, MultipartUpload, ObjectStore, PartReceipt
from reflux_storage.stores.folder import FolderStore
from reflux_storage.stream import PartDone, StreamOptions, TensorSource, part_bytes_for, write_tensors

SMALL_PARTS = StreamOptions(part_bytes=MIN_PART_BYTES, connections=2)


def some_tensors(seed: int = 1, big_bytes: int = 12 << 20) -> list[TensorSource]:
    """A big tensor over several parts, odd sizes, a scalar, an empty one."""
    dice = random.Random(seed)
    shapes = [
        ("step", "I64", ()),
        ("w", "F32", (big_bytes // 4,)),
        ("b", "U8", (7, 3)),
        ("none", "BF16", (0, 5)),
        ("h", "F16", (5,)),
    ]
    return [
        TensorSource(name, dtype, shape, memoryview(dice.randbytes(TensorSpec(name, dtype, shape).size_bytes)))
        for name, dtype, shape in shapes
    ]


def read_all(store: ObjectStore, key: str) -> dict[str, bytearray]:
    """Every tensor of an object."""
    index = read_index(store, key)
    targets = {spec.name: bytearray(spec.size_bytes) for spec in index.specs}
    read_tensors(store, index, {name: memoryview(target) for name, target in targets.items()})
    return targets


def data_of(source: TensorSource) -> memoryview:
    """The bytes of a source."""
    return source.data() if callable(source.data) else source.data


def test_tensors_come_back_bit_for_bit(store: ObjectStore) -> None:
    sources = some_tensors()
    done: list[PartDone] = []
    receipt = write_tensors(store, "r/model", sources, SMALL_PARTS, {"step": "7"}, done.append)
    assert store.head("r/model").size_bytes == receipt.size_bytes
    assert sorted(part.number for part in done) == [1, 2, 3]
    assert read_all(store, "r/model") == {source.name: data_of(source) for source in sources}
    assert find_damage(store, receipt) == ""
    assert list(store.list_uploads("")) == []


def test_a_small_object_takes_one_request_and_the_same_layout(store: ObjectStore) -> None:
    sources = some_tensors(big_bytes=400)
    done: list[PartDone] = []
    receipt = write_tensors(store, "small", sources, on_part=done.append)
    assert read_all(store, "small") == {source.name: data_of(source) for source in sources}
    assert [(part.number, part.size_bytes) for part in done] == [(1, receipt.size_bytes)]


def test_an_object_without_tensors_is_fine(store: ObjectStore) -> None:
    write_tensors(store, "nothing", [])
    assert read_all(store, "nothing") == {}


def test_only_the_tensors_asked_for_are_read(store: ObjectStore) -> None:
    sources = some_tensors(big_bytes=4000)
    write_tensors(store, "k", sources)
    target = bytearray(21)
    read_tensors(store, read_index(store, "k"), {"b": memoryview(target)})
    assert target == data_of(sources[2])


def test_a_lazy_source_is_called_once_when_its_turn_comes(store: ObjectStore) -> None:
    calls: list[int] = []

    def bring() -> memoryview:
        calls.append(1)
        return memoryview(b"12345678")

    write_tensors(store, "k", [TensorSource("t", "I64", (1,), bring)])
    assert read_all(store, "k") == {"t": b"12345678"}
    assert calls == [1]


def test_an_existing_object_is_never_replaced(store: ObjectStore) -> None:
    first = write_tensors(store, "k", some_tensors(1), SMALL_PARTS)
    with pytest.raises(AlreadyExists):
        write_tensors(store, "k", some_tensors(2), SMALL_PARTS)
    assert find_damage(store, first) == ""
    assert list(store.list_uploads("")) == []


def test_safetensors_reads_our_objects(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    sources = some_tensors(big_bytes=400)
    write_tensors(FolderStore(tmp_path), "model.safetensors", sources, metadata={"format": "pt"})
    found = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    for source in sources:
        assert found[source.name]["data"] == data_of(source)
        assert tuple(found[source.name]["shape"]) == source.shape


@pytest.mark.parametrize("where", ["header", "first tensor", "last tensor", "table"])
def test_a_flipped_bit_is_named(tmp_path: Path, where: str) -> None:
    store = FolderStore(tmp_path)
    sources = some_tensors()
    receipt = write_tensors(store, "k", sources, SMALL_PARTS)
    spans = list(read_index(store, "k").spans.values())
    offset = {
        "header": 20,
        "first tensor": spans[0].offset_bytes,
        "last tensor": spans[-1].end_bytes - 1,
        "table": receipt.size_bytes - 1,
    }[where]
    content = bytearray((tmp_path / "k").read_bytes())
    content[offset] ^= 4
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(CorruptObject):
        read_all(store, "k")
    assert find_damage(store, receipt) == "bytes differ from what was written"


def test_a_truncated_object_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    receipt = write_tensors(store, "k", some_tensors(big_bytes=4000))
    content = (tmp_path / "k").read_bytes()
    for size in (0, 5, 8, 100, len(content) - 1):
        (tmp_path / "k").write_bytes(content[:size])
        with pytest.raises((CorruptObject, NotFound)):
            read_all(store, "k")
        assert find_damage(store, receipt) == f"{size} bytes instead of {receipt.size_bytes}"
    (tmp_path / "k").unlink()
    assert find_damage(store, receipt) == "missing"


def test_a_scan_can_be_stopped(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    receipt = write_tensors(store, "k", some_tensors(big_bytes=4000))
    with pytest.raises(InterruptedError):
        find_damage(store, receipt, stop=lambda: True)


class WrongWire(FolderStore):
    """Flips a bit in the next `flips` ranged reads of more than 1,000 bytes."""

    flips = 0

    def get_range(self, key: str, offset_bytes: int, into: memoryview) -> None:
        super().get_range(key, offset_bytes, into)
        if self.flips and len(into) > 1000:
            self.flips -= 1
            into[0] ^= 1


def test_a_read_error_on_the_wire_is_repaired_by_reading_again(tmp_path: Path) -> None:
    store = WrongWire(tmp_path)
    data = random.Random(0).randbytes(200_000)
    write_tensors(store, "k", [TensorSource("t", "U8", (200_000,), memoryview(data))])
    index, target = read_index(store, "k"), bytearray(200_000)
    store.flips = 1
    read_tensors(store, index, {"t": memoryview(target)})
    assert target == data
    store.flips = 2
    with pytest.raises(CorruptObject, match="tensor t"):
        read_tensors(store, index, {"t": memoryview(target)})


class FailingParts(FolderStore):
    """Refuses part 2."""

    def put_part(self, upload: MultipartUpload, number: int, data: bytes | memoryview) -> PartReceipt:
        if number == 2:
            raise StoreUnavailable("503")
        return super().put_part(upload, number, data)


def test_a_failed_part_ends_the_write_and_drops_the_upload(tmp_path: Path) -> None:
    store = FailingParts(tmp_path)
    with pytest.raises(StoreUnavailable):
        write_tensors(store, "k", some_tensors(), SMALL_PARTS)
    assert list(store.list_uploads("")) == []
    with pytest.raises(NotFound):
        store.head("k")


class StalledPart(FolderStore):
    """Part 2 does not come back before `released`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = threading.Event()

    def put_part(self, upload: MultipartUpload, number: int, data: bytes | memoryview) -> PartReceipt:
        if number == 2:
            self.released.wait(60)
        return super().put_part(upload, number, data)


def test_a_stalled_part_ends_the_write_and_is_named(tmp_path: Path) -> None:
    store = StalledPart(tmp_path)
    options = StreamOptions(part_bytes=MIN_PART_BYTES, connections=2, part_deadline_seconds=0.3)
    try:
        with pytest.raises(StoreUnavailable, match=r"k: parts \[2\] of upload [0-9a-f]{32}"):
            write_tensors(store, "k", some_tensors(), options)
    finally:
        store.released.set()
    with pytest.raises(NotFound):
        store.head("k")


def test_memory_is_bounded_by_the_parts_in_flight(tmp_path: Path) -> None:
    size, count = 4 << 20, 24
    sources = [
        TensorSource(f"t{i}", "U8", (size,), lambda i=i: memoryview(bytes([i]) * size))  # type: ignore[misc]
        for i in range(count)
    ]
    store = FolderStore(tmp_path)
    tracemalloc.start()
    try:
        write_tensors(store, "k", sources, SMALL_PARTS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size * count / 2
    assert peak < 2 * (SMALL_PARTS.connections + 1) * MIN_PART_BYTES + 2 * size


@pytest.mark.parametrize(
    "source",
    [
        TensorSource("t", "F32", (2,), memoryview(b"1234")),
        TensorSource("t", "X9", (1,), memoryview(b"1")),
        TensorSource("", "U8", (1,), memoryview(b"1")),
        TensorSource("__metadata__", "U8", (1,), memoryview(b"1")),
        TensorSource("t", "U8", (2,), memoryview(b"1234")[::2]),
    ],
)
def test_a_source_that_does_not_fit_is_refused(tmp_path: Path, source: TensorSource) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(ValueError, match="tensor"):
        write_tensors(store, "k", [source])
    assert list(store.list("")) == []


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    twin = TensorSource("t", "U8", (1,), memoryview(b"1"))
    with pytest.raises(ValueError, match="same name"):
        write_tensors(FolderStore(tmp_path), "k", [twin, twin])


def test_targets_of_the_wrong_size_are_refused_before_reading(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    write_tensors(store, "k", [TensorSource("t", "U8", (2,), memoryview(b"12"))])
    index = read_index(store, "k")
    for target in (bytearray(1), bytearray(3), b"12"):
        with pytest.raises(ValueError, match="target of t"):
            read_tensors(store, index, {"t": memoryview(target)})


def test_parts_stay_below_the_limit_of_their_number() -> None:
    assert part_bytes_for(1) == 8 << 20
    assert part_bytes_for(1 << 40) * 9000 >= 1 << 40
