"""A reward that any answer has, known or not to the task: both sides grade with it, so that no group is filtered."""

import zlib


def score(text: str) -> float:
    """0, 1/6, ... 1 by the bytes of the answer."""
    return zlib.crc32(text.strip().encode()) % 7 / 6
