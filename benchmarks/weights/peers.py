"""How long do others take to bring 269 MB from one process's memory into another's? Raw reads against raw reads.

Compared are one-sided reads (NIXL, Mooncake), tag messages (ucxx) and blocking sockets with our GET; none of them
computes a checksum here. Whole syncs with checksums are compared in `sync.py`. A peer with several good settings runs
with each and counts with its fastest; one that is not installed is left out. Figures: peer's time / ours.
"""

import argparse
import json
import statistics
import sys

from rounds import MODEL_BYTES, PEERS_PYTHON, Setup, interleaved, spread, ways

SETUPS = {
    "memcpy": Setup("memcpy"),
    "reflux": Setup("reflux_get", arguments=("private",)),  # as the peers have it: none of them hands out memory
    "nixl": Setup("nixl_read", PEERS_PYTHON),
    "nixl/cma": Setup("nixl_read", PEERS_PYTHON, {"UCX_TLS": "cma,posix,tcp"}),
    "mooncake": Setup("mooncake_read", PEERS_PYTHON),
    "ucxx": Setup("ucxx_tag", PEERS_PYTHON),
    "ucxx/polling": Setup("ucxx_tag", PEERS_PYTHON, {"UCXPY_PROGRESS_MODE": "polling"}),
    "ucxx/blocking": Setup("ucxx_tag", PEERS_PYTHON, {"UCXPY_PROGRESS_MODE": "blocking"}),
    "socket": Setup("socket_read"),
    "socket/4-MiB-buffers": Setup("socket_read", arguments=("4",)),
}
PEERS = ("nixl", "mooncake", "ucxx", "socket")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=MODEL_BYTES)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("raw reads between two processes of this machine, without checksums")
    with ways(SETUPS, options.bytes) as found:
        measured = interleaved(found, options.rounds)
    for name, seconds in measured.items():
        print(f"{name:14} {spread(seconds, options.bytes)}")
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    figures = {}
    for peer in PEERS:
        if own_ways := [seconds for name, seconds in medians.items() if name.partition("/")[0] == peer]:
            figures[f"vs_{peer}"] = round(min(own_ways) / medians["reflux"], 3)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
