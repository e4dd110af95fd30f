"""Length-prefixed JSON frames between the service and a child. JSON, never pickle: the peer is not trusted."""

import asyncio
import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 8 << 20


class BrokenFrame(ConnectionError):
    """The peer sent something that is not a frame, or one that is too long."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame; raises ValueError for messages above MAX_FRAME_BYTES."""
    text = json.dumps(message, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    body = text.encode(errors="surrogatepass")  # as json.loads reads bytes: half a surrogate pair comes through
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def _length(header: bytes) -> int:
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise BrokenFrame(f"frame of {length} bytes announced, {MAX_FRAME_BYTES} allowed")
    return length


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BrokenFrame("frame is not a JSON object")
    return message


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Child side: writes one frame, blocking."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Child side: the next frame, blocking; None when the peer has closed."""
    header = _exactly(channel, _HEADER.size)
    if header is None:
        return None
    body = _exactly(channel, _length(header))
    return None if body is None else _decode(body)


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


async def receive_async(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Service side: the next frame; None when the child has closed or died."""
    try:
        return _decode(await reader.readexactly(_length(await reader.readexactly(_HEADER.size))))
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None
