"""Which headers cross the gateway, and how they look on the wire. Pure."""

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order in which they came."""
Body = bytes | bytearray

# RFC 9110 section 7.6.1, plus those that each hop writes for itself.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without the hop-by-hop ones, those that `Connection` names included."""
    kept = []
    named: set[bytes] = set()
    for pair in headers:
        name = pair[0]
        if name not in _HOP_BY_HOP:
            kept.append(pair)
        elif name == b"connection":
            named.update(token.strip().lower() for token in pair[1].split(b","))
    return [pair for pair in kept if pair[0] not in named] if named else kept


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines as they are sent, each with its line end."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])
