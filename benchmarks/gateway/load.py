"""Closed-loop HTTP clients with as little work of their own as Python allows; prints one JSON object.

    python load.py http://127.0.0.1:PORT --clients 32 --requests 20000 [--stream --pace-ms 50] [--token T]

One client is a blocking socket, several are connections of one loop; each sends its next request when it has the whole
answer. `failed` counts answers that are not 200 or streams without [DONE], `lost` requests without a whole answer.
"""

import argparse
import asyncio
import json
import re
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"
_DONE = b"[DONE]"
_WARM_UP = 50
_PROMPT = "hello world " * 16


@dataclass
class Tally:
    """What all clients have seen."""

    milliseconds: list[float] = field(default_factory=list)
    failed: int = 0
    lost: int = 0
    started: float = field(default_factory=time.perf_counter)

    def result(self) -> dict[str, float]:
        """Figures of the run; times in milliseconds."""
        seconds = time.perf_counter() - self.started
        ordered = sorted(self.milliseconds) or [0.0]
        at = {f"p{share}_ms": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99)}
        counts = {"requests": len(self.milliseconds), "failed": self.failed, "lost": self.lost}
        return {**counts, "seconds": seconds, **at}


class Answer:
    """Finds the end of one HTTP answer; headers are looked at once, chunks only at their end."""

    def __init__(self) -> None:
        self.good = False
        self._head: bytes | None = b""
        self._missing = 0
        self._chunked = False
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """True when the answer is complete."""
        if self._head is not None:
            self._head += data
            end = self._head.find(_HEAD_END)
            if end < 0:
                return False
            head, data = self._head[:end], self._head[end + len(_HEAD_END) :]
            found = _LENGTH.search(head)
            self.good = head.startswith(b"HTTP/1.1 200")
            self._chunked, self._missing = found is None, int(found[1]) if found else 0
            self._head = None
        if not self._chunked:
            self._missing -= len(data)
            return self._missing <= 0
        self._tail = (self._tail + data)[-64:]
        if not self._tail.endswith(_LAST_CHUNK):
            return False
        self.good = self.good and _DONE in self._tail
        return True


def request(options: argparse.Namespace) -> bytes:
    """The bytes of one request; a body of about 300 bytes."""
    fields = {"model": "mock", "prompt": f"{_PROMPT}PACE={options.pace_ms}", "max_tokens": options.max_tokens}
    fields |= {"stream": True} if options.stream else {}
    fields |= {"n": options.samples} if options.samples > 1 else {}
    body = json.dumps(fields).encode()
    token = f"Authorization: Bearer {options.token}\r\n" if options.token else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{token}"
        f"X-Request-Id: r-123\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def one_client(address: tuple[str, int], raw: bytes, requests: int) -> Tally:
    """Latency as a single blocking client sees it, after a warm-up."""
    tally = Tally()
    with socket.create_connection(address, timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(-min(_WARM_UP, requests // 4), requests):
            answer, begun = Answer(), time.perf_counter()
            connection.sendall(raw)
            while not answer.feed(data := connection.recv(1 << 18)):
                if not data:
                    raise ConnectionError("the answer broke off")
            if number >= 0:
                tally.milliseconds.append((time.perf_counter() - begun) * 1e3)
                tally.failed += not answer.good
    return tally


class Client(asyncio.Protocol):
    """One connection that asks again and again until `left` is used up."""

    def __init__(self, raw: bytes, left: list[int], tally: Tally) -> None:
        self._raw, self._left, self._tally = raw, left, tally
        self._transport: asyncio.WriteTransport | None = None
        self._answer = Answer()
        self._begun = 0.0
        self._waiting = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        if self._answer.feed(data):
            self._tally.milliseconds.append((time.perf_counter() - self._begun) * 1e3)
            self._tally.failed += not self._answer.good
            self._waiting = False
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.lost += self._waiting
        if not self.ended.done():
            self.ended.set_result(None)

    def _next(self) -> None:
        assert self._transport is not None
        if self._left[0] == 0:
            self._transport.close()
            return
        self._left[0] -= 1
        self._answer, self._begun, self._waiting = Answer(), time.perf_counter(), True
        self._transport.write(self._raw)


async def many_clients(address: tuple[str, int], raw: bytes, options: argparse.Namespace) -> Tally:
    """`clients` connections that share `requests` requests; what is not answered within the limit is lost."""
    loop, left, tally = asyncio.get_running_loop(), [options.requests], Tally()

    async def run() -> None:
        try:
            _, client = await loop.create_connection(lambda: Client(raw, left, tally), *address)
        except OSError:
            tally.lost += 1
            return
        await client.ended

    runs = [asyncio.create_task(run()) for _ in range(options.clients)]
    await asyncio.wait(runs, timeout=options.limit_seconds)
    tally.lost = options.requests - len(tally.milliseconds)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--pace-ms", type=int, default=0, help="time between two events of a stream")
    parser.add_argument("--token", default="")
    parser.add_argument("--limit-seconds", type=float, default=120.0)
    options = parser.parse_args()
    parts = urlsplit(options.url)
    address, raw = (parts.hostname or "127.0.0.1", parts.port or 80), request(options)
    if options.clients == 1:
        tally = one_client(address, raw, options.requests)
    else:
        tally = uvloop.run(many_clients(address, raw, options))
    print(json.dumps(tally.result()))


if __name__ == "__main__":
    main()
