"""What does a message cost beside its bytes? The constant alpha of the planner's link model, on this machine.

Many ranges of 4 KiB with gaps between them, read by one call (`read_runs`: what a replica does with strided runs), and
one range of as many bytes, out of another process's memory; interleaved, medians. What the many cost more grows with
their number: the slope of that difference is the cost of a message. `message_us` is that of `ucx`, the link model's
`alpha_seconds` for reads that are posted one after the other, as ours are; tcp sends up to 512 ranges in a request.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
from ways.worker import PATTERN, keep, start

from reflux_transfer.regions import Run
from reflux_transfer.registry import open_backend
from reflux_transfer.settings import TransferEnvironment

TRANSPORTS = ("ucx", "tcp")
RUN_BYTES = 4096
PITCH_BYTES = 2 * RUN_BYTES
_SECONDS = 60.0


def owner(pipe: Connection, length: int) -> None:
    """Holds memory of every transport."""
    backends = [open_backend(name, TransferEnvironment()) for name in TRANSPORTS]
    handles = []
    for backend in backends:
        region = backend.allocate(length)
        np.frombuffer(region.view, np.uint8)[:] = PATTERN
        handles.append(backend.describe(region))
    pipe.send(handles)
    keep(pipe)


def measure(name: str, handle: bytes, counts: Sequence[int], rounds: int) -> dict[int, tuple[float, float]]:
    """Median seconds of the many ranges and of the one, by number of ranges."""
    backend = open_backend(name, TransferEnvironment())
    remote, local = backend.open(handle), backend.allocate(max(counts) * PITCH_BYTES)
    runs = [Run(index * PITCH_BYTES, index * PITCH_BYTES, RUN_BYTES) for index in range(max(counts))]
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    for number in range(rounds + 1):
        for count in counts:
            many = _timed(lambda count=count: backend.read_runs(remote, local, runs[:count], _SECONDS))
            one = _timed(lambda count=count: backend.read(remote, 0, local, 0, count * RUN_BYTES, _SECONDS))
            if number:
                found[count].append((many, one))
    assert (np.frombuffer(local.view, np.uint8)[: max(counts) * RUN_BYTES] == PATTERN).all()
    backend.close()
    return {
        count: (statistics.median(many for many, _ in pairs), statistics.median(one for _, one in pairs))
        for count, pairs in found.items()
    }


def _timed(read: Callable[[], None]) -> float:
    begun = time.perf_counter()
    read()
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    pipe = start(owner, max(options.counts) * PITCH_BYTES)
    figures = {}
    for name, handle in zip(TRANSPORTS, pipe.recv(), strict=True):
        found = measure(name, handle, options.counts, options.rounds)
        for count, (many, one) in found.items():
            print(f"{name}: {count} x {RUN_BYTES} B {many * 1e3:8.3f} ms, one range {one * 1e3:8.3f} ms", flush=True)
        slope, _ = np.polyfit(list(found), [many - one for many, one in found.values()], 1)
        figures["message_us" if name == "ucx" else f"message_us_{name}"] = round(float(slope) * 1e6, 3)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
