"""The engine's OpenAI completions API: the same that vLLM and SGLang offer, for the gateway to relay unchanged."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from reflux_inference_gateway.engine.core import Event
from reflux_inference_gateway.engine.legs import Legs
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.openai_request import CompletionCall, Kind, parse_call
from reflux_inference_gateway.engine.openai_response import ResponseWriter, event
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import (
    EngineStopped,
    FinishedSample,
    GroupRequest,
    ModelLimits,
    QueueFull,
    TokenDelta,
    sample_seed,
)
from reflux_inference_gateway.openai_errors import ApiError
from reflux_kit import auth, scope, telemetry
from reflux_kit.errors import PermissionDenied, Unauthenticated

_OPEN_PATHS = ("/health", "/healthz", "/metrics")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class EngineDoor:
    """Owns the routes of one engine. A run's token opens all of them at the run's own engines, and none elsewhere."""

    engine: EngineLoop
    tokenizer: TextTokenizer
    limits: ModelLimits
    model_id: str
    stack_secret: str
    max_body_bytes: int
    legs: Legs

    def application(self) -> web.Application:
        """The aiohttp application for the kit's server."""
        app = web.Application(middlewares=[self._errors, self._token], client_max_size=self.max_body_bytes)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/healthz", self.health)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer("completion", request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer("chat", request)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        model = {"id": self.model_id, "object": "model", "created": 0, "owned_by": "reflux"}
        model["max_model_len"] = self.limits.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine's thread runs."""
        if self.engine.failure is not None:
            raise ApiError(503, self.engine.failure, code="engine_stopped")
        return web.json_response({"status": "ok", "version": self.engine.load().version})

    async def _answer(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(413, f"the body exceeds {self.max_body_bytes} bytes", code="body_too_large") from error
        call = await asyncio.to_thread(parse_call, kind, body, self.model_id, self.tokenizer, self.limits)
        call_id = ("cmpl-" if kind == "completion" else "chatcmpl-") + uuid.uuid4().hex
        samples, tokens = len(call.prompts) * call.num_samples, sum(map(len, call.prompts))
        with telemetry.span("engine.generate", samples=samples, prompt_tokens=tokens):
            return await self._generate(request, call, call_id)

    async def _generate(self, request: web.Request, call: CompletionCall, call_id: str) -> web.StreamResponse:
        writer = ResponseWriter(call, call_id, self.model_id, self.tokenizer)
        if call.stream:
            return await self._stream(request, call, writer)
        finished = {}
        async for choice, one in self._events(call, call_id):
            if isinstance(one, FinishedSample):
                finished[choice] = one
        answer = writer.whole(finished)
        if call.hand_over:
            answer["kv_transfer_params"] = _for_decode(await self.legs.offered(call.prompts[0], finished[0]))
        return web.json_response(answer)

    async def _stream(self, request: web.Request, call: CompletionCall, writer: ResponseWriter) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        opened: set[int] = set()
        generated = 0
        try:
            async with aclosing(self._events(call, writer.call_id)) as events:
                async for choice, one in events:
                    response = response or await _open_stream(request)
                    chunks = [] if choice in opened else [writer.first(choice)]
                    opened.add(choice)
                    generated += isinstance(one, TokenDelta)
                    chunks.append(
                        writer.delta(choice, one) if isinstance(one, TokenDelta) else writer.last(choice, one)
                    )
                    await response.write(b"".join(chunk for chunk in chunks if chunk))
        except EngineStopped as error:
            if response is None:
                raise
            await response.write(event(ApiError(500, str(error), code="engine_stopped").body()))
            return response
        assert response is not None
        tail = writer.usage_event(generated) if call.include_usage else b""
        await response.write(tail + b"data: [DONE]\n\n")
        return response

    async def _events(self, call: CompletionCall, call_id: str) -> AsyncGenerator[tuple[int, Event], None]:
        """All events of all prompts as (choice, event); prompt p's samples are choices p*n to p*n + n-1."""
        merged: asyncio.Queue[list[tuple[int, Event]] | Exception] = asyncio.Queue()

        async def pump(number: int, request: GroupRequest) -> None:
            try:
                async with aclosing(self.engine.generate(request)) as batches:
                    async for batch in batches:
                        merged.put_nowait([(number * call.num_samples + one.index, one) for one in batch])
            except (QueueFull, EngineStopped) as error:
                merged.put_nowait(error)

        left = len(call.prompts) * call.num_samples
        given = await self.legs.given(call.prompts[0], call.ticket)
        async with AsyncExitStack() as stack:
            for number, prompt in enumerate(call.prompts):
                group = replace(self._group(call, call_id, number, prompt), given=given)
                task = asyncio.create_task(pump(number, group))
                stack.push_async_callback(_cancel, task)
            while left:
                batch = await merged.get()
                if isinstance(batch, Exception):
                    raise batch
                for choice, one in batch:
                    left -= isinstance(one, FinishedSample)
                    yield choice, one

    def _group(self, call: CompletionCall, call_id: str, number: int, prompt: tuple[int, ...]) -> GroupRequest:
        # Prompt p's first sample continues the seeds where prompt p-1's last one ended.
        seed = sample_seed(call.sampling.seed, number * call.num_samples)
        return GroupRequest(
            request_id=f"{call_id}-{number}",
            prompt_ids=prompt,
            num_samples=call.num_samples,
            sampling=replace(call.sampling, seed=seed),
            stream_tokens=call.stream,
            cache_salt=call.cache_salt,
            hand_over=call.hand_over,
        )

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except Unauthenticated as error:
            return ApiError(401, str(error), code="invalid_api_key").response()
        except PermissionDenied as error:
            return ApiError(403, str(error), code="permission_denied").response()
        except QueueFull as error:
            return ApiError(429, str(error), code="overloaded", retry_after_seconds=1).response()
        except EngineStopped as error:
            return ApiError(503, str(error), code="engine_stopped").response()
        except web.HTTPException as error:
            return ApiError(error.status, error.reason or "").response()

    @web.middleware
    async def _token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.stack_secret and request.path not in _OPEN_PATHS:
            claims = auth.from_header(self.stack_secret, request.headers.get("Authorization"))
            if claims.run:
                scope.check_run(self.model_id, claims.run, "model")
        return await handler(request)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _for_decode(ticket: dict[str, Any] | None) -> dict[str, Any] | None:
    """Parameters for the leg that decodes; None when it has to compute the prompt itself."""
    return ticket and {"do_remote_prefill": True, "do_remote_decode": False, "reflux": ticket}


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response
