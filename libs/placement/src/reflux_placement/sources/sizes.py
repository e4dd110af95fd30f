"""Reads amounts of memory as people write them."""

import re

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)?")


def read_bytes(value: object) -> int:
    """Bytes of a number or of a text such as "960GiB". Raises ValueError for anything else, and below zero."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size")
    return int(float(match[1]) * _UNITS[match[2] or ""])
