"""Which headers cross the gateway. Pure."""

from collections.abc import Iterable, Mapping

# RFC 9110 section 7.6.1, plus those that each hop writes for itself.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def end_to_end(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Headers without the hop-by-hop ones, those that `Connection` names included."""
    named = {
        token.strip().lower()
        for name, value in _pairs(headers)
        if name.lower() == "connection"
        for token in value.split(",")
    }
    return [(name, value) for name, value in _pairs(headers) if name.lower() not in _HOP_BY_HOP | named]


def _pairs(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return headers.items()
