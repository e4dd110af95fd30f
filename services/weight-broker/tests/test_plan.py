import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_transfer.layout import Layout, TensorSlot
from reflux_weight_broker.plan import Inline, Tensors, check_layouts, inline_slices
from reflux_weight_broker.refusals import LayoutMismatch


def offer(layout: Layout, slice_bytes: int) -> Inline:
    checksums = tuple(range(len(list(layout.pieces(slice_bytes)))))
    return Inline(layout, checksums, slice_bytes, b"handle", "shm")


@given(
    st.dictionaries(
        st.text("abcd", min_size=1, max_size=3), st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=6
    ),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_every_parameter_byte_is_written_exactly_once_with_the_right_value(
    shapes: dict, slice_bytes: int, random
) -> None:
    source = Layout.from_shapes({name: (shape, "int16") for name, shape in shapes.items()})
    names, offset, slots = list(shapes), 0, {}
    random.shuffle(names)
    for name in names:  # another order, other gaps
        offset += random.randrange(20)
        slots[name] = TensorSlot(name, tuple(shapes[name]), "int16", offset, source.by_name[name].nbytes)
        offset = slots[name].end
    destination = Layout(tuple(slots[name] for name in names))
    data = np.random.default_rng(0).integers(0, 256, source.region_bytes, np.uint8)
    arrived, writes = np.zeros(destination.region_bytes, np.uint8), np.zeros(destination.region_bytes, np.uint8)
    for part in inline_slices(offer(source, slice_bytes), destination):
        assert part.length <= slice_bytes
        where = slice(part.local_offset, part.local_offset + part.length)
        arrived[where] = data[part.remote_offset : part.remote_offset + part.length]
        writes[where] += 1
    for slot in destination.slots:
        theirs = source.by_name[slot.name]
        assert np.array_equal(arrived[slot.offset : slot.end], data[theirs.offset : theirs.end])
        assert (writes[slot.offset : slot.end] == 1).all()
    assert writes.sum() == destination.parameter_bytes


def test_layouts_that_differ_are_refused_by_tensor_name() -> None:
    source = Tensors("a", 1, {"w": ((2,), "float32"), "b": ((2,), "float32")})
    destination = Tensors("b", 1, {"w": ((3,), "float32"), "x": ((2,), "float32")})
    with pytest.raises(
        LayoutMismatch, match=r"replica r0.*missing b.*unexpected x.*w is float32\[3\] instead of float32\[2\]"
    ):
        check_layouts(source, destination, "r0")


def test_layouts_fit_however_they_are_cut_and_ordered() -> None:
    source = Tensors("a", 1, {"w": ((2,), "float32"), "b": ((2,), "int8")})
    check_layouts(source, Tensors("b", 4, {"b": ((2,), "int8"), "w": ((2,), "float32")}), "r0")


def test_an_offer_without_enough_checksums_is_refused() -> None:
    layout = Layout.from_shapes({"w": ([100], "float32")})
    with pytest.raises(ValueError, match="4 slices"):
        inline_slices(Inline(layout, (1,), 100, b"h", "shm"), layout)
