"""Owns the reference executor: runs a plan on numpy memory, packing, relaying and all."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.expand import Expander
from reflux_weightplan.plan import Plan

Memory = NDArray[np.uint8]


def apply(plan: Plan, memories: Sequence[Memory], out: Sequence[Memory]) -> None:
    """Fills the regions of all target ranks from those of the source ranks, both uint8 as long as their regions.

    Raises `ValueError` for memory of another length.
    """
    for what, side, regions in (("source", plan.source, memories), ("target", plan.target, out)):
        wanted = [side.region(rank).nbytes for rank in range(side.ranks)]
        if [len(region) for region in regions] != wanted:
            raise ValueError(f"{what} regions have {[len(each) for each in regions]} bytes, the plan wants {wanted}")
    expander = Expander(plan)
    packed = [_pack(expander, rank, memory) for rank, memory in enumerate(memories)]
    for rank, region in enumerate(out):
        for row in expander.transfers(rank).rows:
            source = (packed if row["packed"] else memories)[row["source_rank"]]
            _runs(region, row["target_offset"], row["target_pitch"], row)[:] = _runs(
                source, row["source_offset"], row["source_pitch"], row
            )
    for rank, region in enumerate(out):
        for row in expander.fetches(rank):
            _runs(region, row["offset"], row["pitch"], row)[:] = _runs(
                out[row["peer"]], row["offset"], row["pitch"], row
            )


def _pack(expander: Expander, rank: int, memory: Memory) -> Memory:
    pieces = expander.pieces(rank)
    area = np.zeros(pieces.pack_bytes, np.uint8)
    for row in pieces.rows[pieces.rows["pack_offset"] >= 0]:
        _runs(area, row["pack_offset"], row["run_bytes"], row)[:] = _runs(
            memory, row["source_offset"], row["pitch"], row
        )
    return area


def _runs(memory: Memory, offset: int, pitch: int, row: np.void) -> Memory:
    """The bytes of a row as [runs, run_bytes], a view that stays inside the memory."""
    runs, run_bytes = int(row["runs"]), int(row["run_bytes"])
    end = int(offset) + (runs - 1) * int(pitch) + run_bytes
    if offset < 0 or end > len(memory):
        raise ValueError(f"bytes {offset}:{end} lie outside a region of {len(memory)} bytes")
    window = memory[int(offset) : end]
    return np.lib.stride_tricks.as_strided(window, (runs, run_bytes), (int(pitch), 1))
