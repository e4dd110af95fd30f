"""A process that offers one region filled with `pattern`: python owner_process.py BACKEND LENGTH; speaks lines on
stdin and stdout.
"""

import sys

import numpy as np

from reflux_transfer.registry import open_backend


def pattern(length: int) -> np.ndarray:
    """Bytes in which no range of 8 or more equals a neighbouring one."""
    counter = np.arange(-(-length // 4), dtype=np.uint32) * np.uint32(2654435761)
    return counter.view(np.uint8)[:length]


def main() -> None:
    """Prints the handle, then obeys "withdraw" and "quit"."""
    name, length = sys.argv[1], int(sys.argv[2])
    backend = open_backend(name)
    region = backend.allocate(length)
    region.view[:] = memoryview(pattern(length))
    print(backend.describe(region).hex(), flush=True)
    for line in sys.stdin:
        if line.strip() == "withdraw":
            backend.unregister(region)
            print("withdrawn", flush=True)
        else:
            break
    backend.close()


if __name__ == "__main__":
    main()
