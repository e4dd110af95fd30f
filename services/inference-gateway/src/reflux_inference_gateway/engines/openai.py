"""Engines that speak HTTP only (vLLM, SGLang): one POST to /v1/completions with n = the samples of the share.

Written against vLLM 0.32 and SGLang 0.5.23: token ids in and out by `return_token_ids`, `logprobs` 0 for the sampled
token's log-prob before temperature and cuts, `cache_salt` so that no prefix outlives the weights that computed it.
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import aiohttp

from reflux.common.v1.common_pb2 import Sample
from reflux_inference_gateway.dispatch import ReplicaLost
from reflux_inference_gateway.engines.base import ReplicaClient
from reflux_inference_gateway.engines.drawing import Drawing
from reflux_inference_gateway.engines.hangup import HungUp, Line
from reflux_inference_gateway.errors import Overloaded
from reflux_inference_gateway.wire import GroupCall
from reflux_kit import telemetry
from reflux_kit.errors import DeadlinePassed, InvalidRequest

_KEEPALIVE_SECONDS = 2.0
"""Below the 5 s after which uvicorn hangs up: a request must not go out on a socket that is being closed."""

_CONNECT_SECONDS = 5.0
_SHOWN = 500
_MAX_SEED = (1 << 63) - 1
_REFUSED = (400, 404, 413, 422)


class OpenAiReplica(ReplicaClient):
    """Owns the connections to one engine, and the calls that are under way.

    `abort` hangs up, which ends the request in either engine, and delivers the tokens that came so far; a whole group
    is not streamed and has none until its end.
    """

    def __init__(self, url: str, model_id: str, *, seeds_samples: bool) -> None:
        """`seeds_samples`: sample i of a request with seed s draws from s + i, as in vLLM. An engine that would draw
        the same n times gets a seed for single samples only.
        """
        self._url, self._model_id, self._seeds_samples = url, model_id, seeds_samples
        self._session: aiohttp.ClientSession | None = None
        self._lines: dict[str, list[Line]] = {}

    async def generate(
        self, call: GroupCall, deadline_seconds: float | None, serving: Callable[[], int]
    ) -> AsyncGenerator[Sequence[Sample], None]:
        if call.num_samples > 1 and not call.sampling.temperature:
            # vLLM refuses several greedy samples of a prompt: they are one and the same.
            async with aclosing(self._drawn(call.share(call.first_sample, 1), deadline_seconds, serving)) as samples:
                async for (sample,) in samples:
                    yield [_with_index(sample, call.first_sample + index) for index in range(call.num_samples)]
            return
        async with aclosing(self._drawn(call, deadline_seconds, serving)) as batches:
            async for finished in batches:
                yield finished

    async def _drawn(
        self, call: GroupCall, deadline_seconds: float | None, serving: Callable[[], int]
    ) -> AsyncGenerator[list[Sample], None]:
        """The samples of one request as they finish."""
        drawing = Drawing(call.first_sample, call.num_samples, serving)
        body = self._body(call, serving() if call.version is None else call.version)
        with self._line(call.request_id) as line:
            try:
                async with aclosing(self._answers(body, deadline_seconds, line)) as answers:
                    async for answer in answers:
                        if finished := drawing.take(answer["choices"]):
                            yield finished
            except HungUp:
                yield drawing.rest()
            except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                raise self._failure(error, deadline_seconds) from error
        if drawing.missing:
            raise ReplicaLost(f"{self._url} ended the answer with {drawing.missing} samples missing")

    async def abort(self, request_id: str) -> None:
        for line in self._lines.get(request_id, ()):
            line.hang_up()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answers(
        self, body: dict[str, Any], deadline_seconds: float | None, line: Line
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of the answer as they come: one, or a stream of events."""
        headers: dict[str, str] = {}
        telemetry.inject(headers)
        timeout = aiohttp.ClientTimeout(total=deadline_seconds, sock_connect=_CONNECT_SECONDS)
        request = self._open().post(f"{self._url}/v1/completions", json=body, headers=headers, timeout=timeout)
        async with await line.until(request) as response:
            if response.status != 200:
                raise self._refusal(response.status, await response.text())
            if not body["stream"]:
                yield json.loads(await line.until(response.read()))
                return
            rest = b""
            while chunk := await line.until(response.content.readany()):
                *lines, rest = (rest + chunk).split(b"\n")
                for text in lines:
                    if text.startswith(b"data:") and (event := text[5:].strip()) != b"[DONE]":
                        yield self._checked(json.loads(event))

    def _body(self, call: GroupCall, version: int) -> dict[str, Any]:
        sampling = call.sampling
        body: dict[str, Any] = {
            "model": self._model_id,
            "prompt": call.prompt_token_ids,
            "n": call.num_samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": not call.whole_group,
            "cache_salt": f"weight-version:{version}",
        }
        if sampling.top_p:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if sampling.stop_token_ids:
            body["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.stops:
            body["stop"] = list(sampling.stops)
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if self._seeds_samples or call.num_samples == 1:
            body["seed"] = (sampling.seed + call.first_sample) & _MAX_SEED
        return body

    def _checked(self, event: dict[str, Any]) -> dict[str, Any]:
        if error := event.get("error"):
            raise self._refusal(error.get("code") or 500, str(error.get("message")))
        return event

    def _refusal(self, status: object, text: str) -> Exception:
        if status in _REFUSED:
            return InvalidRequest(f"{self._url}: {status} {text[:_SHOWN]}")
        if status == 429:
            return Overloaded(f"{self._url}: {text[:_SHOWN]}")
        return ReplicaLost(f"{self._url}: {status} {text[:_SHOWN]}")

    def _failure(self, error: Exception, deadline_seconds: float | None) -> Exception:
        if isinstance(error, InvalidRequest):
            return error
        if type(error) is TimeoutError:
            return DeadlinePassed(f"{self._url} did not answer in {deadline_seconds} s")
        return ReplicaLost(f"{self._url}: {type(error).__name__}: {error}")

    @contextmanager
    def _line(self, request_id: str) -> Iterator[Line]:
        lines = self._lines.setdefault(request_id, [])
        lines.append(line := Line())
        try:
            yield line
        finally:
            lines.remove(line)
            if not lines:
                self._lines.pop(request_id, None)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def _with_index(sample: Sample, index: int) -> Sample:
    copy = Sample()
    copy.CopyFrom(sample)
    copy.index = index
    return copy
