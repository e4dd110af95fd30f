"""memmove of the same bytes inside one process, between memory of the same kind: the yardstick of a run."""

import ctypes
import sys

import numpy as np
from worker import PATTERN, answer

from reflux_transfer.memory import private


def main() -> None:
    length = int(sys.argv[1])
    source, target = (np.frombuffer(private(length), np.uint8) for _ in range(2))
    source[:] = PATTERN
    copy = ctypes.CDLL(None).memmove
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    answer(
        lambda: copy(target.ctypes.data, source.ctypes.data, length),
        lambda: bool((target == PATTERN).all()),
        lambda: target[::4096].fill(0),
    )


if __name__ == "__main__":
    main()
