"""Answers of XREAD and XREADGROUP for one stream, the same for both versions of the Redis protocol."""

from typing import Any

Entries = list[tuple[bytes, dict[bytes, bytes]]]


def entries_of(answer: Any) -> Entries:
    """Entries of the only stream that was read; an empty list when the wait ended without one."""
    if not answer:
        return []
    streams = answer.items() if isinstance(answer, dict) else answer
    for _stream, entries in streams:
        # RESP3 wraps the entries of a stream once more.
        return entries[0] if entries and isinstance(entries[0], list) else entries
    return []
