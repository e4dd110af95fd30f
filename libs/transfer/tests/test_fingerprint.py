import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import LAYOUT, tensors

from reflux_transfer import fingerprint
from reflux_transfer.layout import Layout


def test_the_tree_is_the_hash_of_the_checksums_as_little_endian_words() -> None:
    assert fingerprint.tree([1, 2]) == xxhash.xxh3_64_intdigest(bytes([1, *[0] * 7, 2, *[0] * 7]))
    assert fingerprint.tree([2, 1]) != fingerprint.tree([1, 2])
    assert fingerprint.tree([(1 << 64) - 1]) == xxhash.xxh3_64_intdigest(b"\xff" * 8)


def filled(layout: Layout, gap: int) -> bytearray:
    memory = bytearray([gap]) * layout.region_bytes
    for slot in layout.slots:
        memory[slot.offset : slot.end] = tensors(1)[slot.name].tobytes()
    return memory


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([slot.name for slot in LAYOUT.slots]), st.data())
def test_every_parameter_bit_counts(name: str, data: st.DataObject) -> None:
    memory = filled(LAYOUT, 0)
    before = fingerprint.of(memoryview(memory), LAYOUT)
    slot = LAYOUT.by_name[name]
    memory[data.draw(st.integers(slot.offset, slot.end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint.of(memoryview(memory), LAYOUT) != before


def test_gaps_and_offsets_do_not_count() -> None:
    shifted = Layout.from_shapes({"pad": ([300], "uint8"), **{s.name: (s.shape, s.dtype) for s in LAYOUT.slots}})
    moved = Layout(shifted.slots[1:])
    expected = fingerprint.of(memoryview(filled(LAYOUT, 0)), LAYOUT)
    assert fingerprint.of(memoryview(filled(LAYOUT, 255)), LAYOUT) == expected
    assert fingerprint.of(memoryview(filled(moved, 7)), moved) == expected


def test_pieces_are_cut_at_4_mib() -> None:
    layout = Layout.from_shapes({"a": ([(4 << 20) + 1], "uint8")})
    memory = memoryview(np.arange((4 << 20) + 1, dtype=np.uint32).astype(np.uint8))
    parts = [xxhash.xxh3_64_intdigest(memory[: 4 << 20]), xxhash.xxh3_64_intdigest(memory[4 << 20 :])]
    assert fingerprint.of(memory, layout) == fingerprint.tree(parts)
