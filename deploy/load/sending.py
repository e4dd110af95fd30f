"""Open-loop sending: a request goes out when it is due, whatever became of those before it."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from request_mix import Arrival

_BREATH_SECONDS = 0.2


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds, those of the answer from the moment when it was due."""

    kind: str
    at: float
    late: float = 0.0
    """How long after it was due it was sent: the generator's own delay."""
    error: str = ""
    """Empty when the answer was whole; otherwise the kind of failure, from a small set."""
    first: float | None = None
    """First event of a stream."""
    total: float = 0.0
    tokens: int = 0

    @property
    def per_token(self) -> float | None:
        """Time between two tokens of a stream after the first one, on average."""
        if self.error or self.first is None or self.tokens < 2:
            return None
        return (self.total - self.first) / (self.tokens - 1)


async def send_all(
    url: str, token: str, planned: Iterable[Arrival], *, limit_seconds: float, max_inflight: int
) -> list[Outcome]:
    """Sends every arrival at its time and waits for the answers; those above `max_inflight` are counted, not sent."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    outcomes: list[Outcome] = []
    inflight: set[asyncio.Task[None]] = set()
    timeout = aiohttp.ClientTimeout(total=limit_seconds)
    async with aiohttp.ClientSession(
        url.rstrip("/") + "/", connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        start = time.perf_counter() + _BREATH_SECONDS
        for arrival in planned:
            await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            outcome = Outcome(arrival.kind, arrival.at, late=time.perf_counter() - start - arrival.at)
            outcomes.append(outcome)
            if len(inflight) >= max_inflight:
                outcome.error = "not sent: too many in flight"
                continue
            task = asyncio.create_task(_send(session, arrival, outcome, start + arrival.at))
            inflight.add(task)
            task.add_done_callback(inflight.discard)
        if inflight:
            await asyncio.wait(inflight)
    return outcomes


async def first_model(url: str, token: str) -> str:
    """The first model that the endpoint lists; raises `aiohttp.ClientError` or `LookupError`."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
        session.get(f"{url.rstrip('/')}/v1/models") as response,
    ):
        response.raise_for_status()
        models = (await response.json())["data"]
    if not models:
        raise LookupError("the endpoint lists no model")
    return models[0]["id"]


async def _send(session: aiohttp.ClientSession, arrival: Arrival, outcome: Outcome, due: float) -> None:
    try:
        async with session.post(arrival.path.removeprefix("/"), json=arrival.body) as response:
            if response.status != 200:
                outcome.error = f"status {response.status}"
                await response.read()
            elif response.headers.get("Content-Type", "").startswith("text/event-stream"):
                await _read_events(response, outcome, due)
            else:
                _count_whole(await response.json(), outcome)
    except TimeoutError:
        outcome.error = "timeout"
    except aiohttp.ClientConnectorError:
        outcome.error = "no connection"
    except (aiohttp.ClientError, ValueError) as error:
        outcome.error = f"broken answer ({type(error).__name__})"
    outcome.total = time.perf_counter() - due


async def _read_events(response: aiohttp.ClientResponse, outcome: Outcome, due: float) -> None:
    """Reads a stream to its [DONE]; one that ends without it, or with an error event, is a failure."""
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        if outcome.first is None:
            outcome.first = time.perf_counter() - due
        text = line[5:].strip()
        if text == b"[DONE]":
            done = True
            continue
        event = json.loads(text)
        if "error" in event:
            outcome.error = f"error event ({_code(event['error'])})"
        usage = event.get("usage")
        outcome.tokens = usage["completion_tokens"] if usage else outcome.tokens + bool(event.get("choices"))
    if not (done or outcome.error):
        outcome.error = "stream without [DONE]"


def _count_whole(answer: dict[str, Any], outcome: Outcome) -> None:
    if not answer.get("choices"):
        outcome.error = "answer without choices"
    outcome.tokens = (answer.get("usage") or {}).get("completion_tokens", 0)


def _code(error: object) -> object:
    return (error.get("code") or error.get("type")) if isinstance(error, dict) else "unknown"
