"""Owns the test of exact cover: which ranges of a tensor no box holds, and which several boxes hold."""

from collections.abc import Sequence

import numpy as np

from reflux_weightplan.boxes import Box


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    """Missing and doubled ranges of a tensor under some boxes, each list disjoint; both empty for an exact cover.

    Works on the grid of all box borders, so it costs as many cells as the product of borders per dimension.
    """
    whole = Box.whole(shape)
    kept = [inside for box in boxes if (inside := box.intersect(whole)) is not None]
    borders = [
        np.unique([0, size, *(box.start[dim] for box in kept), *(box.stop[dim] for box in kept)])
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([len(each) - 1 for each in borders], np.int64)
    for box in kept:
        ends = zip(borders, box.start, box.stop, strict=True)
        counts[tuple(slice(*np.searchsorted(each, (low, high))) for each, low, high in ends)] += 1
    return _ranges(counts == 0, borders), _ranges(counts > 1, borders)


def _ranges(chosen: np.ndarray, borders: Sequence[np.ndarray]) -> list[Box]:
    """Chosen cells of the grid as boxes; neighbours along the first dimension are joined."""
    found: dict[tuple, Box] = {}
    cells = np.argwhere(np.moveaxis(chosen, 0, -1)) if chosen.ndim else np.argwhere(chosen)
    for cell in cells.tolist():
        cell = cell[-1:] + cell[:-1]
        start = tuple(int(each[index]) for each, index in zip(borders, cell, strict=True))
        stop = tuple(int(each[index + 1]) for each, index in zip(borders, cell, strict=True))
        row = (start[1:], stop[1:])
        before = found.pop((row, start[:1]), None)
        found[(row, stop[:1])] = Box(before.start if before else start, stop)
    return list(found.values())
