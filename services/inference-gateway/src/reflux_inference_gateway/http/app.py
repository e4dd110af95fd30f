"""Routes of the OpenAI door: generation is relayed byte for byte, errors are OpenAI error objects."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from reflux_inference_gateway import metrics
from reflux_inference_gateway.dispatch import Dispatcher, Want
from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded, UnknownModel
from reflux_inference_gateway.http.headers import end_to_end
from reflux_inference_gateway.http.shadow import Shadow, read_shadow
from reflux_inference_gateway.http.upstream import Head, Part, send
from reflux_inference_gateway.openai_errors import ApiError
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit import auth, scope, telemetry
from reflux_kit.errors import PermissionDenied, ServiceError, Unauthenticated

log = logging.getLogger(__name__)

_MIN_VERSION = "X-Reflux-Min-Version"
_OPEN_PATHS = ("/healthz", "/metrics")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class OpenAiDoor:
    """Owns the routes; both doors share the dispatcher.

    A run's token reaches the run's own model only, which is called like the run; the list of models is open to it.
    """

    dispatcher: Dispatcher
    session: aiohttp.ClientSession
    settings: GatewaySettings
    started_seconds: float

    def application(self) -> web.Application:
        """The aiohttp application for the kit's server."""
        app = web.Application(middlewares=[self._errors, self._token], client_max_size=self.settings.max_body_bytes)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """Every model with at least one replica."""
        return web.json_response({"object": "list", "data": [_model(name) for name in self.dispatcher.table.models()]})

    async def model(self, request: web.Request) -> web.Response:
        """One model, or 404."""
        name = request.match_info["model"]
        self._check_scope(request, name)
        if name not in self.dispatcher.table.models():
            raise _unknown(name)
        return web.json_response(_model(name))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Relays a completion or chat request to a replica."""
        body = await _read(request)
        shadow = read_shadow(body)
        self._check_scope(request, shadow.model)
        await self._known(shadow.model)
        want = Want(
            model_id=shadow.model,
            num_tokens=shadow.num_tokens,
            min_version=_min_version(request),
            http=True,
            deadline_seconds=self.settings.request_seconds,
        )
        with telemetry.span("gateway.http", model=shadow.model, path=request.path):
            async with aclosing(self.dispatcher.stream(want, self._sender(request, body))) as parts:
                return await self._relay(request, shadow, parts)

    def _sender(self, request: web.Request, body: bytes) -> Callable[[Replica], AsyncGenerator[Part, None]]:
        headers = end_to_end(request.headers)
        carrier: dict[str, str] = {}
        telemetry.inject(carrier)
        headers = [pair for pair in headers if pair[0].lower() not in carrier] + list(carrier.items())

        def to(replica: Replica) -> AsyncGenerator[Part, None]:
            return send(self.session, request.method, replica.info.http_url + request.path_qs, headers, body)

        return to

    async def _relay(self, request: web.Request, shadow: Shadow, parts: AsyncIterator[Part]) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async for part in parts:
                if isinstance(part, bytes):
                    assert response is not None
                    await response.write(part)
                elif part.streamed:
                    response = web.StreamResponse(status=part.status, headers=part.headers)
                    await response.prepare(request)
                else:
                    response = _whole(part)
        except GenerationLost as error:
            if response is None:
                raise
            log.warning("stream of %s broke: %s", shadow.model, error)
            event = json.dumps(ApiError(502, str(error), code="generation_lost").body())
            await response.write(f"data: {event}\n\n".encode())
        assert response is not None
        return response

    async def _known(self, model: str) -> None:
        """Raises 404 for a model that no replica serves; right after a start it may still register."""
        deadline = self.started_seconds + self.settings.startup_grace_seconds
        while model not in self.dispatcher.table.models():
            left = deadline - self.dispatcher.clock()
            if left <= 0:
                raise _unknown(model)
            await self.dispatcher.changes.wait(left)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every failure leaves as an OpenAI error object."""
        try:
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except ServiceError as error:
            response = _as_api_error(error).response()
        except web.HTTPException as error:
            response = ApiError(error.status, error.reason or "").response()
            response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
        route = request.match_info.route.resource
        metrics.HTTP_RESPONSES.labels(route.canonical if route else "unknown", str(response.status)).inc()
        return response

    @web.middleware
    async def _token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            self._run_of(request)
        return await handler(request)

    def _run_of(self, request: web.Request) -> str:
        """The run that the caller's token is for; empty when it is the stack's, or none is needed."""
        if not self.settings.stack_secret:
            return ""
        return auth.from_header(self.settings.stack_secret, request.headers.get("Authorization")).run

    def _check_scope(self, request: web.Request, model: str) -> None:
        if run := self._run_of(request):
            scope.check_run(model, run, "model")


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(413, f"the body exceeds {request._client_max_size} bytes", code="body_too_large") from error


def _min_version(request: web.Request) -> int:
    text = request.headers.get(_MIN_VERSION, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ApiError(400, f"{_MIN_VERSION} must be a whole number, got {text[:40]!r}", param=_MIN_VERSION)
    return int(text)


def _whole(head: Head) -> web.Response:
    return web.Response(status=head.status, body=head.body, headers=head.headers)


def _model(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "reflux"}


def _unknown(model: str) -> ApiError:
    return ApiError(404, f"the model {model[:200]!r} does not exist", param="model", code="model_not_found")


def _as_api_error(error: ServiceError) -> ApiError:
    match error:
        case Unauthenticated():
            return ApiError(401, str(error), code="invalid_api_key")
        case PermissionDenied():
            return ApiError(403, str(error), code="permission_denied")
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case Overloaded():
            return ApiError(429, str(error), code="overloaded", retry_after_seconds=1)
        case NoReplica():
            return ApiError(503, str(error), code="no_replica", retry_after_seconds=1)
        case GenerationLost():
            return ApiError(502, str(error), code="generation_lost")
    return ApiError(500, str(error), code=error.reason.lower())
