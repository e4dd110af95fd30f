"""How near does a one-sided read come to a memcpy? 269 MB by `ucx` out of another process's private memory.

Both memories are private and have their pages (no mapping of the owner's); the owner sleeps. The memmove beside it is
between two such memories in one process. Every byte is compared at the end.
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
    with ways({name: Setup(name) for name in ("memcpy", "reflux_get")}, options.bytes) as found:
        measured = interleaved(found, options.rounds)
    for name, seconds in measured.items():
        print(f"{name:14} {spread(seconds, options.bytes)}")
    ratio = statistics.median(measured["memcpy"]) / statistics.median(measured["reflux_get"])
    print(json.dumps({"get_vs_memcpy": round(ratio, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
