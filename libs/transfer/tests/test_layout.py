import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_transfer.errors import LayoutError
from reflux_transfer.layout import Layout, TensorSlot
from reflux_weightplan.dtypes import ITEM_BYTES
from reflux_weightplan.sides import ALIGNMENT_BYTES

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(sorted(ITEM_BYTES))),
    min_size=1,
    max_size=8,
)


@given(SHAPES, st.integers(1, 500))
def test_pieces_cover_every_tensor_byte_once_and_no_gap(shapes: dict, slice_bytes: int) -> None:
    layout = Layout.from_shapes(shapes)
    covered = [0] * layout.region_bytes
    for piece in layout.pieces(slice_bytes):
        assert 0 < piece.length <= slice_bytes
        for position in range(piece.slot.offset + piece.start, piece.slot.offset + piece.start + piece.length):
            covered[position] += 1
    inside = [0] * layout.region_bytes
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT_BYTES == 0
        assert slot.nbytes == math.prod(slot.shape) * ITEM_BYTES[slot.dtype]
        for position in range(slot.offset, slot.end):
            inside[position] += 1
    assert covered == inside
    assert layout.parameter_bytes == sum(inside)


@pytest.mark.parametrize(
    ("slots", "names"),
    [
        ([], "no tensors"),
        ([TensorSlot("a", (1,), "float32", 0, 4), TensorSlot("a", (1,), "float32", 4, 4)], "a appears twice"),
        ([TensorSlot("a", (2,), "float32", 0, 8), TensorSlot("b", (1,), "float32", 4, 4)], "a and b overlap"),
        ([TensorSlot("a", (2,), "float32", 0, 7)], "a has 7 bytes"),
        ([TensorSlot("a", (0,), "float32", 0, 0)], "a has shape"),
        ([TensorSlot("a", (1,), "float32", -4, 4)], "a has shape"),
        ([TensorSlot("a", (1,), "decimal", 0, 4)], "'decimal'"),
        ([TensorSlot("", (1,), "float32", 0, 4)], "no name"),
    ],
)
def test_inconsistent_layouts_are_refused_by_name(slots: list[TensorSlot], names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        Layout(tuple(slots))
