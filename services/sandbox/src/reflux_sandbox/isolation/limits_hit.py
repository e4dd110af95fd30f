"""Limits as a worker notices them: which exception means which limit, and the signals that carry the news out."""

import errno
import signal
import traceback

MEMORY_SIGNAL = signal.SIGRTMAX
"""A worker that ran out of memory ends itself with this signal; code that fakes it only mislabels its own failure."""
PIDS_SIGNAL = signal.SIGRTMAX - 1
DISK_SIGNAL = signal.SIGRTMAX - 2

_DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def disk_is_full(error: BaseException) -> bool:
    """No room for bytes, or for a file."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def hit_process_limit(error: BaseException) -> bool:
    """EAGAIN of a fork or thread; for a file that does not block it means something else: the failing line decides."""
    if isinstance(error, BlockingIOError):
        frames_of_error = traceback.extract_tb(error.__traceback__)
        return bool(frames_of_error) and "fork" in (frames_of_error[-1].line or "")
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
