"""Verifiers that are servers: the /verify contract of NeMo Gym's resources servers, called from this process.

Contract (NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py): POST /seed_session with the row of the dataset, then POST
/verify with the row, `responses_create_params` and `response`, an OpenAI Responses object; the answer has `reward`,
and `mask_sample` when that is no measurement. Cookies of the first call go with the second.
"""

import asyncio
import json
import logging
import math
import time
import uuid
from typing import Any

import aiohttp

from reflux_kit.errors import StartupError
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.base import Backend, GradingSession, OpenSession
from reflux_sandbox.remote.settings import HttpSettings

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.2, 5.0
_MESSAGE_CHARACTERS = 500
_MOST_FIGURES = 64
_BUSY = (408, 425, 429)


class _TryAgain(ConnectionError):
    """The server is away, busy or failed; the same call may succeed."""


class _Refused(RuntimeError):
    """The server will not grade this, however often it is asked."""


class HttpBackend(Backend):
    """Owns the client; one verifier per server."""

    def __init__(self, servers: dict[str, HttpSettings]) -> None:
        self._servers = servers
        self._client: aiohttp.ClientSession | None = None

    @property
    def verifiers(self) -> list[VerifierInfo]:
        return [
            VerifierInfo(
                name=name,
                version=server.version,
                fidelity=server.fidelity,
                trusted=True,
                cost_seconds=server.cost_seconds,
                canonical_form="exact",
            )
            for name, server in self._servers.items()
        ]

    async def start(self) -> None:
        for name in self._servers:
            if "/" not in name:
                raise StartupError(f"remote.http.{name}: a verifier's name is TASK/VERIFIER, for example my-env/verify")
        self._client = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def session(self, info: VerifierInfo) -> GradingSession:
        assert self._client is not None, "started first"
        return HttpSession(self._client, self._servers[info.name])


class HttpSession(OpenSession):
    """Verifies the answers of a job in parallel; each ends for itself."""

    def __init__(self, client: aiohttp.ClientSession, server: HttpSettings) -> None:
        self._client = client
        self._server = server
        self._room = asyncio.Semaphore(server.parallel)

    async def grade(self, verifier: str, payload: str, answers: list[str]) -> dict[str, Any]:
        """`payload` is a JSON object, the row of the dataset. An answer that got no reward is infra_error, never 0."""
        del verifier
        row = json.loads(payload)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._verify(row, answer)) for answer in answers]
        return {"grades": [task.result() for task in tasks]}

    async def _verify(self, row: dict[str, Any], answer: str) -> dict[str, Any]:
        pause = _FIRST_PAUSE_SECONDS
        async with self._room:
            for attempt in range(1, self._server.attempts + 1):
                try:
                    return parse_verdict(await self._attempt(row, answer))
                except _Refused as error:
                    return _unknown(str(error))
                except _TryAgain as error:
                    if attempt == self._server.attempts:
                        return _unknown(f"{error} (attempt {attempt} of {attempt})")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns")

    async def _attempt(self, row: dict[str, Any], answer: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._server.attempt_seconds):
                cookies: dict[str, str] = {}
                if self._server.seed_session:
                    await self._post("seed_session", row, cookies)
                return await self._post("verify", verify_request(row, answer), cookies)
        except TimeoutError:
            raise _TryAgain(f"no verdict within {self._server.attempt_seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error

    async def _post(self, path: str, body: dict[str, Any], cookies: dict[str, str]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._server.token}"} if self._server.token else {}
        url = f"{self._server.url.rstrip('/')}/{path}"
        async with self._client.post(
            url, json=body, headers=headers, cookies=cookies, allow_redirects=False
        ) as response:
            raw = await response.content.read(self._server.most_response_bytes + 1)
            while len(raw) <= self._server.most_response_bytes and (more := await response.content.readany()):
                raw += more
            if response.status >= 500 or response.status in _BUSY:
                raise _TryAgain(f"{path} answered {response.status}: {_short(raw)}")
            if response.status != 200:
                raise _Refused(f"{path} answered {response.status}: {_short(raw)}")
            if len(raw) > self._server.most_response_bytes:
                raise _Refused(f"{path} answered more than {self._server.most_response_bytes} bytes")
            cookies.update({name: morsel.value for name, morsel in response.cookies.items()})
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise _Refused(f"{path} did not answer a JSON object: {_short(raw)}")
        return document


def verify_request(row: dict[str, Any], answer: str) -> dict[str, Any]:
    """Body of /verify: the row, and the answer as the one message of a Responses object."""
    content = {"type": "output_text", "text": answer, "annotations": []}
    message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "reflux",
        "output": [{**message, "content": [content]}],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
    }
    return {"responses_create_params": {"input": []}, **row, "response": response}


def parse_verdict(document: dict[str, Any]) -> dict[str, Any]:
    """A grade from the answer of /verify; infra_error when it holds no measurement."""
    reward = document.get("reward")
    if document.get("mask_sample") is True:
        kind, reason = document.get("failure_kind"), document.get("failure_reason")
        return _unknown(f"the server masks the sample: {kind or 'no kind'}, {reason or 'no reason'}")
    if (value := _finite(reward)) is None:
        return _unknown(f"the server's reward is {str(reward)[:40]}")
    components = document.get("reward_components")
    given = {**document, **(components if isinstance(components, dict) else {})}
    figures = {name[:64]: number for name, each in given.items() if (number := _finite(each)) is not None}
    figures.pop("reward", None)
    return {"outcome": "scored", "reward": value, "figures": dict(list(figures.items())[:_MOST_FIGURES]), "message": ""}


def _finite(value: object) -> float | None:
    """A number of the answer, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def _unknown(message: str) -> dict[str, Any]:
    return {"outcome": "infra_error", "reward": 0.0, "figures": {}, "message": message[:_MESSAGE_CHARACTERS]}


def _short(raw: bytes) -> str:
    return " ".join(raw[:200].decode(errors="replace").split())
