"""Routes of the OpenAI door: generation is relayed byte for byte, errors are OpenAI error objects."""

from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import orjson
from prometheus_client import Counter, generate_latest

from reflux_inference_gateway import metrics
from reflux_inference_gateway.dispatch import Attempt, Dispatcher
from reflux_inference_gateway.http import edits
from reflux_inference_gateway.http.access import Access, Caller
from reflux_inference_gateway.http.answer import Answer
from reflux_inference_gateway.http.exchange import Exchange, Request
from reflux_inference_gateway.http.failures import as_api_error, unknown_model
from reflux_inference_gateway.http.headers import Headers, end_to_end, lines
from reflux_inference_gateway.http.hints import Hints, read_hints
from reflux_inference_gateway.http.shadow import Shadow, read_shadow
from reflux_inference_gateway.http.tracing import traced
from reflux_inference_gateway.http.trajectories import Trajectories
from reflux_inference_gateway.http.upstream import Upstreams, relay
from reflux_inference_gateway.openai_errors import ApiError
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.routing.base import Ask
from reflux_inference_gateway.settings import GatewaySettings
from reflux_inference_gateway.share import Share
from reflux_inference_gateway.want import Want
from reflux_kit.errors import ServiceError

_JSON: Headers = [(b"content-type", b"application/json")]
_METRICS: Headers = [(b"content-type", b"text/plain; version=0.0.4")]
_MODEL_PREFIX = b"/v1/models/"


@dataclass(frozen=True)
class Relayed:
    """A path that goes to a replica of the request's model, whose engine may or may not have it."""

    model_required: bool = True
    """False where engines take bodies without a model; then the only model that is served is meant."""
    generates: bool = True
    """True when its body may be edited."""


RELAYED = {
    b"/v1/completions": Relayed(),
    b"/v1/chat/completions": Relayed(),
    b"/v1/responses": Relayed(),
    b"/v1/embeddings": Relayed(generates=False),
    b"/generate": Relayed(model_required=False),
    b"/inference/v1/generate": Relayed(model_required=False),
    b"/tokenize": Relayed(model_required=False, generates=False),
    b"/detokenize": Relayed(model_required=False, generates=False),
}
_OPEN = (b"/healthz", b"/metrics")


@dataclass
class OpenAiDoor:
    """Owns the routes; both doors share the dispatcher.

    A run's token reaches the run's own model only, which is called like the run; the list of models is open to it.
    """

    dispatcher: Dispatcher
    upstreams: Upstreams
    access: Access
    settings: GatewaySettings
    started_seconds: float
    trajectories: Trajectories = field(default_factory=Trajectories)
    _counters: dict[tuple[bytes, int], Counter] = field(default_factory=dict)

    def screen(self, request: Request) -> ApiError | None:
        """Refuses strangers, unknown paths and wrong methods before a body is read."""
        path = request.path
        if path in _OPEN:
            return None if request.method in (b"GET", b"HEAD") else _wrong_method("GET")
        try:
            request.caller = self.access.caller(request.header(b"authorization"))
        except ApiError as error:
            return error
        if path in RELAYED:
            return None if request.method == b"POST" else _wrong_method("POST")
        if path == b"/v1/models" or path.startswith(_MODEL_PREFIX):
            return None if request.method in (b"GET", b"HEAD") else _wrong_method("GET")
        return ApiError(404, f"there is no {path[:200].decode('latin-1')!r} here", code="not_found")

    async def serve(self, exchange: Exchange) -> None:
        """Answers one request; every failure leaves as an OpenAI error object."""
        request = exchange.request
        try:
            if request.refusal is not None:
                raise request.refusal
            if request.path in RELAYED:
                await self._relay(exchange, RELAYED[request.path])
            else:
                self._answer(exchange)
        except (ApiError, ServiceError) as error:
            exchange.fail(as_api_error(error))
        finally:
            self._count(request, exchange.status)

    def fail(self, exchange: Exchange, error: ApiError) -> None:
        """Ends an answer that is not complete."""
        exchange.fail(error)

    def _count(self, request: Request, status: int) -> None:
        """Counts an answer; status 499 stands for a client that went away before it."""
        key = (request.path, status or 499)
        counter = self._counters.get(key)
        if counter is None:
            known = key[0] in RELAYED or key[0] in _OPEN or key[0] == b"/v1/models"
            counter = metrics.HTTP_RESPONSES.labels(key[0].decode() if known else "other", str(key[1]))
            if known:
                self._counters[key] = counter
        counter.inc()

    def _answer(self, exchange: Exchange) -> None:
        """Paths that the gateway answers itself."""
        path = exchange.request.path
        if path == b"/healthz":
            exchange.respond(200, _JSON, b'{"status": "ok"}')
        elif path == b"/metrics":
            exchange.respond(200, _METRICS, generate_latest())
        elif path == b"/v1/models":
            served = {"object": "list", "data": [_model(name) for name in self.dispatcher.table.models()]}
            exchange.respond(200, _JSON, orjson.dumps(served))
        else:
            name = unquote_to_bytes(path.removeprefix(_MODEL_PREFIX)).decode("utf-8", "replace")
            _caller(exchange.request).check_model(name)
            if name not in self.dispatcher.table.models():
                raise unknown_model(name)
            exchange.respond(200, _JSON, orjson.dumps(_model(name)))

    async def _relay(self, exchange: Exchange, path: Relayed) -> None:
        request, caller = exchange.request, _caller(exchange.request)
        self.access.enter(caller)
        try:
            shadow = read_shadow(request.body, model_required=path.model_required)
            hints = read_hints(request.headers)
            model = shadow.model or self._only_model()
            caller.check_model(model)
            await self._known(model)
            with traced(request, model) as trace:
                attempt = self._attempt(exchange, shadow, hints.session if path.generates else "", trace)
                await self.dispatcher.serve(self._want(shadow, hints, caller, model), attempt)
        finally:
            self.access.leave(caller)

    def _want(self, shadow: Shadow, hints: Hints, caller: Caller, model: str) -> Want:
        version = self.dispatcher.table.newest_version(model) if hints.version is None else hints.version
        ask = Ask(
            num_samples=shadow.num_samples,
            prompt=shadow.prompt_key(),
            num_prompt_tokens=shadow.num_prompt_tokens,
            max_tokens=shadow.max_tokens,
            session=hints.session,
            run=caller.run,
            salt=str(version),
        )
        return Want(
            model_id=model,
            num_tokens=shadow.num_tokens,
            min_version=hints.min_version,
            max_lag=hints.max_lag,
            version=hints.version,
            ask=ask,
            session=hints.session,
            tenant=caller.tenant,
            http=True,
            deadline_seconds=self.settings.request_seconds,
        )

    def _attempt(self, exchange: Exchange, shadow: Shadow, session: str, trace: Headers) -> Attempt:
        request = exchange.request
        head = lines(self._headers(request, trace))

        async def attempt(replica: Replica, share: Share) -> bool:
            info, body = replica.info, request.body
            if session:
                version = self.trajectories.started(info.model_id, session, info.version)
                body = edits.apply(body, shadow.fields, edits.salt(info.engine, version))

            def begin(answer: Answer) -> None:
                share.attempts.delivered = True
                _pass_on(answer, exchange)

            await relay(self.upstreams.origin(info.http_url), request.method, request.target, head, body, begin)
            return exchange.status < 500

        return attempt

    def _headers(self, request: Request, trace: Headers) -> Headers:
        """What the replica gets: the client's headers, our trace context, and no key that only the gateway knows."""
        headers, ours = end_to_end(request.headers), list(trace)
        if _caller(request).key is not None:
            ours.append((b"authorization", self.access.own_authorization()))
        names = {name for name, _ in ours}
        return [pair for pair in headers if pair[0] not in names] + [pair for pair in ours if pair[1]]

    def _only_model(self) -> str:
        models = self.dispatcher.table.models()
        if len(models) != 1:
            raise ApiError(400, f"model is required: {len(models)} models are served", param="model")
        return models[0]

    async def _known(self, model: str) -> None:
        """Raises 404 for a model that no replica serves; right after a start it may still register."""
        deadline = self.started_seconds + self.settings.startup_grace_seconds
        while not self.dispatcher.table.entries(model):
            left = deadline - self.dispatcher.clock()
            if left <= 0:
                raise unknown_model(model)
            await self.dispatcher.changes.wait(left)


def _pass_on(answer: Answer, exchange: Exchange) -> None:
    """Sends a whole answer, or the head of one that is relayed from now on as it comes."""
    headers = end_to_end(answer.headers)
    if answer.streamed:
        exchange.open(answer.status, headers, event_stream=answer.is_event_stream)
        exchange.flow = answer
        answer.relay(exchange)
    else:
        exchange.respond(answer.status, headers, answer.body())


def _caller(request: Request) -> Caller:
    assert request.caller is not None
    return request.caller


def _model(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "reflux"}


def _wrong_method(allowed: str) -> ApiError:
    return ApiError(405, f"this path takes {allowed} only", code="method_not_allowed", allow=allowed)
