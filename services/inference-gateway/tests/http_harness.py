"""The OpenAI door alone on port 0, replicas that record what they get, and clients that send raw bytes."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.http.service import openai_service
from reflux_inference_gateway.replicas import ReplicaInfo, ReplicaTable
from reflux_inference_gateway.routing import POLICIES
from reflux_inference_gateway.settings import GatewaySettings

HANG_SECONDS = 20
GO_ON = b'data: {"choices": [{"text": "a"}]}\n\n'


@dataclass(frozen=True)
class Seen:
    """One request as a replica got it."""

    method: str
    target: str
    headers: dict
    body: bytes
    connection: int


class Recorder:
    """A replica; `answer(seen, reader, writer)` says what it does with a request."""

    def __init__(self, answer=None):
        self.answer = answer or whole(b'{"ok": true}')
        self.requests = []
        self.connections = 0
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        """A client hung up, or ended its connection."""
        self._open = {}

    @asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 27)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self._open.values():
                writer.transport.abort()
            await asyncio.gather(*self._open)

    async def _serve(self, reader, writer):
        self.connections += 1
        number = self.connections
        self._open[asyncio.current_task()] = writer
        try:
            while True:
                line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                headers = dict(one.split(": ", 1) for one in lines)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = line.split(" ")
                self.requests.append(Seen(method, target, headers, body, number))
                self.arrived.set()
                await self.answer(self.requests[-1], reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()
            del self._open[asyncio.current_task()]


def whole(body, status=200, **headers):
    """Answers with a body of known length."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()).encode()

    async def answer(seen, reader, writer):
        writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(body), body))

    return answer


async def hang(seen, reader, writer):
    """Never answers; sees a hang-up."""
    await reader.readexactly(1)


def stream(*pieces, then=None):
    """Sends pieces of an event stream; then ends it, or does what `then` says."""

    async def answer(seen, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if then is None:
            writer.write(b"0\r\n\r\n")
        else:
            await then(seen, reader, writer)

    return answer


async def die(seen, reader, writer):
    """The connection ends at once."""
    writer.transport.abort()
    raise ConnectionResetError


class Door:
    """A listening door, its dispatcher and an HTTP client of it."""

    def __init__(self, port, dispatcher, session):
        self.port, self.dispatcher, self.session = port, dispatcher, session

    def register(self, url, *, name="a", model="m", engine="torch", version=0):
        info = ReplicaInfo(name=name, model_id=model, http_url=url, engine=engine, version=version)
        self.dispatcher.table.register(info, self.dispatcher.clock())

    async def post(self, path="/v1/completions", data=None, headers=None, **fields):
        """(status, headers, body) of a POST of {"model": "m", ...} or of `data`."""
        body = json.dumps({"model": "m", **fields}).encode() if data is None else data
        async with self.session.post(path, data=body, headers=headers) as response:
            return response.status, response.headers, await response.read()

    async def error(self, *args, **kwargs):
        """(status, error object) of such a request."""
        status, _, body = await self.post(*args, **kwargs)
        return status, json.loads(body)["error"]

    async def connect(self):
        """A raw connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, data):
        """Everything that the door says to raw bytes until it closes."""
        reader, writer = await self.connect()
        writer.write(data)
        async with asyncio.timeout(HANG_SECONDS):
            answer = await reader.read()
        writer.close()
        return answer


def request(body=b'{"model": "m"}', path="/v1/completions", method="POST", extra=""):
    """A request as raw bytes."""
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{extra}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def door(*recorders, engine="torch", scheme="http", ssl=None, **fields):
    """A door in front of replicas of the model "m"."""
    settings = GatewaySettings(**{"startup_grace_seconds": 0, "drain_seconds": 0, "replica_wait_seconds": 0, **fields})
    dispatcher = Dispatcher(
        table=ReplicaTable(), fleet=Fleet(), new_policy=POLICIES["round_robin"], replica_wait_seconds=0
    )
    async with openai_service(dispatcher, settings)("127.0.0.1", 0) as port:
        base, connector = f"{scheme}://localhost:{port}", aiohttp.TCPConnector(ssl=ssl or True)
        async with aiohttp.ClientSession(base, connector=connector) as session:
            opened = Door(port, dispatcher, session)
            urls = [await _enter(recorder) for recorder in recorders]
            for number, (url, _) in enumerate(urls):
                opened.register(url, name=f"r{number}", engine=engine)
            try:
                yield opened
            finally:
                for _, context in urls:
                    await context.__aexit__(None, None, None)


async def _enter(recorder):
    context = recorder.serving()
    return await context.__aenter__(), context
