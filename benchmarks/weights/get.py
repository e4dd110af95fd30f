"""How near does a one-sided read come to a memcpy? 269 MB by `ucx` out of another process's memory; the owner sleeps.

The bytes go into private memory, out of memory for readers as it ships (`get`: a segment of UCX's, which is mapped,
where /dev/shm has huge pages; else private memory), out of private memory (`cma`), or out of a segment in any case
(`segment`). The memmove beside it is between two private memories of one process. All have their pages. Every byte is
compared at the end.
"""

import argparse
import json
import statistics
import sys

from rounds import MODEL_BYTES, Setup, interleaved, spread, ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=MODEL_BYTES)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    setups = {
        "memcpy": Setup("memcpy"),
        "get": Setup("reflux_get"),
        "cma": Setup("reflux_get", arguments=("private",)),
        "segment": Setup("reflux_get", environment={"REFLUX_TRANSFER_UCX_SEGMENTS": "on"}),
    }
    with ways(setups, options.bytes) as found:
        measured = interleaved(found, options.rounds)
    for name, seconds in measured.items():
        print(f"{name:14} {spread(seconds, options.bytes)}")
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    figures = {
        "get_vs_memcpy": medians["memcpy"] / medians["get"],
        "cma_vs_memcpy": medians["memcpy"] / medians["cma"],
        "segment_vs_memcpy": medians["memcpy"] / medians["segment"],
    }
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
