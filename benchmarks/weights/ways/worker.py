"""One way to move the bytes, in a process of its own that works only when it is asked.

A line on stdin asks for one transfer; the answer is a line with its seconds. `ready` says that everything is set up,
`check` compares all bytes that arrived last. The same on every Python: no import but the standard library.
"""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

PATTERN = 0x5A


def answer(transfer: Callable[[], None], arrived: Callable[[], bool], clear: Callable[[], None]) -> None:
    """Answers until stdin ends. `clear` makes sure, outside the measured time, that old bytes are not taken for new."""
    _say("ready")
    for line in sys.stdin:
        if line.strip() == "check":
            _say("whole" if arrived() else "other bytes")
            continue
        clear()
        begun = time.perf_counter()
        transfer()
        _say(repr(time.perf_counter() - begun))


def _say(text: str) -> None:
    print(text, flush=True)


def start(owner: Callable[[Connection, int], None], length: int) -> Connection:
    """Runs `owner(pipe, length)` in another process, which has the bytes; returns the other end."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=owner, args=(theirs, length), daemon=True).start()
    theirs.close()
    return ours


def keep(pipe: Connection) -> None:
    """Keeps the owner's memory, and the processor free, until the reader has gone."""
    with contextlib.suppress(EOFError):
        pipe.recv()
