"""A replica that answers at once, so that a benchmark measures the proxy in front of it and not the replica.

    python fast_worker.py           prints "http://127.0.0.1:PORT", serves until it is ended

Completions with `n` samples of `max_tokens` tokens each, ids and log-probs included; `"stream": true` sends one event
per token and sample, a step per turn of the loop, or every k ms when the prompt holds "PACE=k". What shapes the answer
is in fields that every router passes on. Bodies are searched and not parsed, answers are made once per shape. Also
there: the routes by which routers look at a replica before they use it, and `GET /requests`, the number of completions.
"""

import asyncio
import json
import re
from functools import lru_cache

import uvloop

_STREAM = re.compile(rb'"stream": ?true')
_PACE = re.compile(rb"PACE=(\d+)")
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_SAMPLES = re.compile(rb'"n": ?(\d+)')
_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODEL = "mock"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


def _event(value: object) -> bytes:
    return _chunk(b"data: %b\n\n" % _json(value))


def _choice(index: int, num_tokens: int) -> dict[str, object]:
    ids = [(7919 * (index + 1) + 31 * place) % 150_000 for place in range(num_tokens)]
    logprobs = [round(-0.01 * ((7 * index + 13 * place) % 97) - 0.0001234, 6) for place in range(num_tokens)]
    values = {"tokens": ["tok "] * num_tokens, "token_logprobs": logprobs}
    text = "tok " * num_tokens
    return {"index": index, "text": text, "token_ids": ids, "logprobs": values, "finish_reason": "length"}


def _completion(**fields: object) -> dict[str, object]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": _MODEL, **fields}


@lru_cache(maxsize=256)
def completion(samples: int, max_tokens: int) -> bytes:
    """The whole answer with `samples` choices of `max_tokens` tokens."""
    tokens = samples * max_tokens
    usage = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": tokens + 16}
    choices = [_choice(index, max_tokens) for index in range(samples)]
    return _answer(_json(_completion(choices=choices, usage=usage)))


@lru_cache(maxsize=512)
def token_event(index: int, last: bool) -> bytes:
    """One token of one choice of a stream."""
    reason = "length" if last else None
    return _event(_completion(choices=[{**_choice(index, 1), "finish_reason": reason}]))


_LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_PROBES = {
    b"/v1/models": {"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "mock", "root": _MODEL}]},
    b"/health": {},
}
_INFO = {"model_path": _MODEL, "served_model_name": _MODEL, "is_generation": True, "dp_size": 1, "tp_size": 1}


class FastWorker(asyncio.Protocol):
    """One connection."""

    requests = 0

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._received = b""
        self._timer: asyncio.Handle | None = None
        self._left = 0
        self._samples = 1

    def connection_made(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(_HEAD_END)) >= 0:
            head = self._received[:end]
            found = _LENGTH.search(head)
            begin = end + len(_HEAD_END)
            finish = begin + (int(found[1]) if found else 0)
            if len(self._received) < finish:
                return
            body, self._received = self._received[begin:finish], self._received[finish:]
            self._respond(head.split(b" ", 2)[1], body)

    def _respond(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if path == b"/requests":
            self._transport.write(_answer(b"%d" % FastWorker.requests))
        elif not path.endswith(b"completions"):
            self._transport.write(_answer(_json(_PROBES.get(path, _INFO))))
        else:
            FastWorker.requests += 1
            found, asked = _MAX_TOKENS.search(body), _SAMPLES.search(body)
            samples, max_tokens = int(asked[1]) if asked else 1, int(found[1]) if found else 1
            if _STREAM.search(body):
                self._start(samples, max_tokens, _PACE.search(body))
            else:
                self._transport.write(completion(samples, max_tokens))

    def _start(self, samples: int, max_tokens: int, pace: re.Match[bytes] | None) -> None:
        assert self._transport is not None
        self._samples, self._left = samples, max_tokens
        self._transport.write(_STREAM_HEAD)
        self._send(int(pace[1]) / 1e3 if pace else 0.0)

    def _send(self, pause_seconds: float) -> None:
        """One event per call: a proxy that joins small writes or waits for acknowledgements shows it."""
        if self._transport is None:
            return
        if self._left == 0:
            self._transport.write(_LAST)
            return
        self._left -= 1
        for index in range(self._samples):
            self._transport.write(token_event(index, self._left == 0))
        self._timer = asyncio.get_running_loop().call_later(pause_seconds, self._send, pause_seconds)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(FastWorker, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
