"""Boxes, and the reference of exact cover against sets of points."""

import itertools

import pytest
from explicit_layouts import cover
from hypothesis import given
from hypothesis import strategies as st

from reflux_weightplan.boxes import Box
from reflux_weightplan.errors import LayoutRefused


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(*ends) for ends in zip(box.start, box.stop, strict=True))))


@given(st.lists(boxes_in((6, 5)), max_size=5))
def test_cover_lists_exactly_the_missing_and_the_doubled_points(boxes: list[Box]) -> None:
    missing, doubled = cover((6, 5), boxes)
    times = {point: sum(point in points(box) for box in boxes) for point in points(Box.whole((6, 5)))}
    for found, wanted in ((missing, {p for p in times if not times[p]}), (doubled, {p for p in times if times[p] > 1})):
        listed = [point for box in found for point in points(box)]
        assert len(listed) == len(set(listed))
        assert set(listed) == wanted


def test_a_gap_of_many_rows_is_one_range() -> None:
    assert cover((100, 8), [Box((0, 0), (10, 8)), Box((70, 0), (100, 8))])[0] == [Box((10, 0), (70, 8))]


def test_a_scalar_is_covered_by_its_only_box() -> None:
    assert cover((), [Box((), ())]) == ([], [])
    assert cover((), []) == ([Box((), ())], [])
    assert cover((), [Box((), ())] * 2) == ([], [Box((), ())])


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,))])
def test_a_box_that_is_none_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(LayoutRefused):
        Box(start, stop)
