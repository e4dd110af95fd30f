"""How fast, and how compactly, is a 4,608-GPU gang placed on 100,800 GPUs at 85 % load?

1,400 racks x 18 nodes x 4 GPUs in 175 blocks; the gang is 1,152 nodes in 72 segments of 16, every segment in one rack.
The load is made by churn through the policy itself (`churn.py`): uniform random load leaves no room at all. 200
snapshots, with and without 1.5 % of the nodes down (then jobs hold 85 % of the others). The number of blocks is
compared with the exact minimum for the same occupancy: the fewest blocks whose whole segments sum up to the gang, taken
in falling order. The garbage collector is on and set as in the scheduler; place_no_gc_p99_ms is without it.

Last line: one JSON object.
"""

import argparse
import gc
import json
import resource
import sys
import time
from dataclasses import dataclass, field

import churn
import numpy as np

from reflux_placement.gang import Assignment
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.search import find_place
from reflux_placement.room import Room
from reflux_scheduler.main import settle_memory

SEGMENT, SEGMENTS, NODE_GPUS = 16, 72, 4


def fewest_blocks(room: Room) -> int:
    """Exact minimum of blocks that hold 72 whole segments now; 0 when none do."""
    topology = room.topology
    whole_N = (room.usable_NR()[:, 0] >= NODE_GPUS).astype(np.int64)
    racks = topology.sums(whole_N, topology.tightness("rack")) // SEGMENT
    first_node = topology.starts[topology.tightness("rack")]
    block_of_rack = topology.domain_LN[topology.tightness("block"), first_node]
    held = np.sort(np.bincount(block_of_rack, weights=racks))[::-1].cumsum()
    return int(np.searchsorted(held, SEGMENTS)) + 1 if held[-1] >= SEGMENTS else 0


def check(room: Room, found: Assignment) -> int:
    """Blocks that it uses; asserts that every segment is whole, in one rack, on free nodes that nobody has twice."""
    topology, nodes = room.topology, found.nodes["worker"]
    assert len(np.unique(nodes)) == SEGMENT * SEGMENTS
    assert (room.usable_NR()[nodes, 0] >= NODE_GPUS).all()
    racks = topology.domain_LN[topology.tightness("rack"), nodes].reshape(SEGMENTS, SEGMENT)
    assert (racks == racks[:, :1]).all()
    return len(np.unique(topology.domain_LN[topology.tightness("block"), nodes]))


@dataclass
class Measured:
    """What came out of the snapshots with one share of nodes down."""

    times_ms: list[float] = field(default_factory=list)
    no_gc_times_ms: list[float] = field(default_factory=list)
    placed: int = 0
    possible: int = 0
    """Snapshots in which the gang fits at all."""

    over_min: list[float] = field(default_factory=list)
    """Blocks used / fewest possible."""


def timed_ms(room: Room, *, collect: bool) -> tuple[Assignment | Misfit, float]:
    """The decision and its milliseconds, with the collector on or off."""
    if not collect:
        gc.disable()
    started = time.perf_counter()
    found = find_place(room, churn.BIG_GANG)
    milliseconds = (time.perf_counter() - started) * 1e3
    gc.enable()
    return found, milliseconds


def measure(down: float, snapshots: int) -> Measured:
    """Places the gang into every snapshot, once with the collector and once without, in turns which one is first."""
    result = Measured()
    load = churn.Churn(churn.cluster(), 0.85, down_share=down)
    settle_memory()
    for number, snapshot in enumerate(load.snapshots(snapshots)):
        room = snapshot.room
        for collect in (True, False) if number % 2 else (False, True):
            found, milliseconds = timed_ms(room, collect=collect)
            (result.times_ms if collect else result.no_gc_times_ms).append(milliseconds)
        least = fewest_blocks(room)
        result.possible += least > 0
        if isinstance(found, Assignment):
            result.placed += 1
            result.over_min.append(check(room, found) / least)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=200)
    count = parser.parse_args().snapshots
    results = []
    for down in (0.0, 0.015):
        each = measure(down, count)
        results.append(each)
        p50, p99 = np.percentile(each.times_ms, [50, 99])
        print(
            f"down {down:.1%}: placed {each.placed} of {count} (room for {each.possible}), p50 {p50:.3f} ms, "
            f"p99 {p99:.3f} ms, max {max(each.times_ms):.3f} ms, "
            f"blocks / exact minimum: mean {np.mean(each.over_min):.3f}, max {max(each.over_min):.3f}"
        )
    times_ms = [each for result in results for each in result.times_ms]
    no_gc_times_ms = [each for result in results for each in result.no_gc_times_ms]
    figures = {
        "place_p99_ms": round(float(np.percentile(times_ms, 99)), 3),
        "place_no_gc_p99_ms": round(float(np.percentile(no_gc_times_ms, 99)), 3),
        "place_feasible": round(min(result.placed for result in results) / count, 4),
        "place_blocks_over_min": round(max(max(result.over_min) for result in results), 4),
        "place_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
