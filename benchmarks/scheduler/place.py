"""How fast, and how compactly, is a 4,608-GPU gang placed on 100,800 GPUs at 85 % load?

1,400 racks x 18 nodes x 4 GPUs in 175 blocks; the gang is 1,152 nodes in 72 segments of 16, every segment in one rack.
The load is made by churn through the policy itself (`churn.py`): uniform random load leaves no room at all. 200
snapshots, with and without 1.5 % of the nodes down. The number of blocks is compared with the exact minimum for the
same occupancy: the fewest blocks whose whole segments sum up to the gang, taken in falling order.

Last line: one JSON object.
"""

import argparse
import gc
import json
import resource
import sys
import time

import churn
import numpy as np

from reflux_placement.gang import Assignment
from reflux_placement.place.search import find_place
from reflux_placement.room import Room

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


def measure(down: float, snapshots: int) -> tuple[list[float], int, int, list[float]]:
    """Milliseconds per decision, gangs placed, gangs that fit at all, blocks used over the minimum."""
    times, placed, possible, over = [], 0, 0, []
    load = churn.Churn(churn.cluster(), 0.85, down_share=down)
    for snapshot in load.snapshots(snapshots):
        room = snapshot.room
        started = time.perf_counter()
        found = find_place(room, churn.BIG_GANG)
        times.append((time.perf_counter() - started) * 1e3)
        least = fewest_blocks(room)
        possible += least > 0
        if isinstance(found, Assignment):
            placed += 1
            over.append(check(room, found) / least)
    return times, placed, possible, over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=200)
    count = parser.parse_args().snapshots
    gc.disable()  # A pause of the collector is not the policy's time; memory stays within the bar all the same.
    all_times: list[float] = []
    feasible, over = [], []
    for down in (0.0, 0.015):
        times, placed, possible, ratios = measure(down, count)
        all_times += times
        feasible.append(placed / count)
        over += ratios
        p50, p99 = np.percentile(times, [50, 99])
        print(
            f"down {down:.1%}: placed {placed} of {count} (room for {possible}), p50 {p50:.3f} ms, p99 {p99:.3f} ms, "
            f"max {max(times):.3f} ms, blocks / exact minimum: mean {np.mean(ratios):.3f}, max {max(ratios):.3f}"
        )
    figures = {
        "place_p99_ms": round(float(np.percentile(all_times, 99)), 3),
        "place_feasible": round(min(feasible), 4),
        "place_blocks_over_min": round(max(over), 4),
        "place_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
