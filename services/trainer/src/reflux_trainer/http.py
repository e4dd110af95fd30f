"""The trainer's HTTP face: /v1/runs as JSON and server-sent events, and a plain page for people."""

import json
from importlib import resources
from urllib.parse import urlsplit
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from redis.exceptions import RedisError

from reflux_kit import auth
from reflux_kit.errors import PermissionDenied, ServiceError, Unavailable
from reflux_runs.errors import ConfigError
from reflux_runs.load import load_document
from reflux_trainer.messages import parse_run_id, refused, run_json
from reflux_trainer.records import RunRecord
from reflux_trainer.store import RunStore
from reflux_trainer.supervisor import Supervisor
from reflux_trainer.tenancy import Tenancy
from reflux_trainer.tinker.http import PREFIX as TINKER

_OPEN_PATHS = ("/", "/healthz", "/metrics")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_BODY_BYTES = 1 << 20
_STATUS = {
    "INVALID_REQUEST": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "CAPACITY_EXHAUSTED": 429,
    "NOT_FOUND": 404,
    "WRONG_STATE": 409,
    "CONFLICT": 409,
    "UNAVAILABLE": 503,
    "DEADLINE_PASSED": 504,
}
_SUPERVISOR = web.AppKey("supervisor", Supervisor)
_STORE = web.AppKey("store", RunStore)
_TENANCY = web.AppKey("tenancy", Tenancy)


def application(supervisor: Supervisor, store: RunStore, stack_secret: str, tenancy: Tenancy) -> web.Application:
    """The routes; everything but page, health and metrics needs the stack's token once there is a secret."""
    app = web.Application(middlewares=[_guard(stack_secret)], client_max_size=_MAX_BODY_BYTES)
    app[_SUPERVISOR], app[_STORE], app[_TENANCY] = supervisor, store, tenancy
    app.router.add_get("/", _page)
    app.router.add_post("/v1/runs", _create)
    app.router.add_get("/v1/runs", _list)
    app.router.add_get("/v1/runs/{run}", _get)
    app.router.add_get("/v1/runs/{run}/events", _events)
    for verb in ("pause", "resume", "cancel"):
        app.router.add_post(f"/v1/runs/{{run}}/{verb}", _verb(verb))
    app.router.add_post("/v1/runs/{run}/fork", _fork)
    return app


def _guard(stack_secret: str) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path.startswith(f"{TINKER}/"):
                pass  # its keys come in a header that no page may send to another origin
            elif not stack_secret:
                _refuse_foreign_pages(request)
            elif request.path not in _OPEN_PATHS:
                claims = auth.from_header(stack_secret, request.headers.get("Authorization"), tenants=True)
                if claims.run:
                    raise PermissionDenied(f"the token is for the run {claims.run!r} only", run=claims.run)
                auth.tenant.set(claims.tenant)
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error(error.status, "HTTP_ERROR", f"{request.method} {request.path}: {error.reason}", {})
        except ConfigError as error:
            known = refused(error)
            return _error(400, known.reason, str(known), known.metadata)
        except ServiceError as error:
            return _error(_STATUS.get(error.reason, 500), error.reason, str(error), error.metadata)
        except RedisError as error:
            away = Unavailable(f"Redis does not answer ({type(error).__name__})")
            return _error(503, away.reason, str(away), {})

    return guard


def _refuse_foreign_pages(request: web.Request) -> None:
    """Without a secret the address is a loopback one, which any page in a browser of this machine can call: a page of
    another origin must neither post (no form can send JSON unasked) nor read by a name that it made resolve to us."""
    origin = request.headers.get("Origin")
    for what, host in (("Host", request.host), ("Origin", origin.partition("://")[2] if origin else request.host)):
        if _hostname(host) not in _LOOPBACK:
            raise web.HTTPForbidden(reason=f"{what} is not this machine; set REFLUX_STACK_SECRET to serve others")
    if origin and origin.partition("://")[2] != request.host:
        raise web.HTTPForbidden(reason="Origin is another page's; set REFLUX_STACK_SECRET to serve it")
    if request.method == "POST" and request.can_read_body and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(reason="Content-Type must be application/json")


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # an unfinished IPv6 address
        return None


def _error(status: int, reason: str, message: str, metadata: dict[str, str]) -> web.Response:
    body = {"error": {"reason": reason, "message": message, **metadata}}
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response(body, status=status, headers=headers)


async def _page(_request: web.Request) -> web.Response:
    text = resources.files("reflux_trainer").joinpath("dashboard.html").read_text()
    return web.Response(text=text, content_type="text/html")


async def _create(request: web.Request) -> web.Response:
    document = await _body(request)
    request_id = str(document.pop("request_id", "") or uuid4())
    resume_run = str(document.pop("resume_run", ""))
    config = document.pop("config", None)
    if document or not (config is None or isinstance(config, dict)):
        key = next(iter(document), "config")
        return _error(
            400, "INVALID_REQUEST", f'{key}: send {{"config": {{...}}}} with the keys of a run file', {"field": key}
        )
    parsed = load_document(config) if config is not None else None
    supervisor = request.app[_SUPERVISOR]
    if resume_run:
        record = await supervisor.resume(await _owned(request, parse_run_id(resume_run, "resume_run")), parsed)
    elif parsed is None:
        return _error(400, "INVALID_REQUEST", "config is missing; an empty object is the recipe", {"field": "config"})
    else:
        record = await supervisor.create(parsed, request_id)
    return await _run_response(request, record, status=201)


async def _fork(request: web.Request) -> web.Response:
    document = await _body(request)
    request_id, checkpoint = str(document.pop("request_id", "") or uuid4()), str(document.pop("checkpoint", ""))
    changes = document.pop("changes", {})
    if document or not isinstance(changes, dict):
        key = next(iter(document), "changes")
        return _error(
            400, "INVALID_REQUEST", f'{key}: send {{"changes": {{...}}}} with keys of a run file', {"field": key}
        )
    record = await request.app[_SUPERVISOR].fork(await _run(request), checkpoint, changes, request_id)
    return await _run_response(request, record, status=201)


async def _body(request: web.Request) -> dict[str, object]:
    try:
        document = await request.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise web.HTTPBadRequest(reason="the body must be a JSON object")
    return document


async def _list(request: web.Request) -> web.Response:
    store = request.app[_STORE]
    size, before = (_count(request, name, default) for name, default in (("page_size", 100), ("page_token", 0)))
    records, following = await store.page(min(size or 100, 500), before, request.app[_TENANCY].caller)
    runs = [run_json(record, await store.step(record.run)) for record in records]
    return web.json_response({"runs": runs, "next_page_token": str(following) if following else ""})


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise web.HTTPBadRequest(reason=f"{name} must be a number")
    return int(text or default)


async def _get(request: web.Request) -> web.Response:
    return await _run_response(request, await request.app[_STORE].get(await _run(request)))


async def _events(request: web.Request) -> web.StreamResponse:
    store, run = request.app[_STORE], await _run(request)
    await store.get(run)
    token = request.headers.get("Last-Event-ID", request.query.get("resume_token", ""))
    if token and not token.replace("-", "", 1).isdigit():
        raise web.HTTPBadRequest(reason="Last-Event-ID is not one of ours")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    async for watched in store.watch(run, token):
        body = vars(watched.event) | {"state": watched.record.shown_state, "message": watched.record.message}
        await response.write(f"id: {watched.token}\ndata: {json.dumps(body)}\n\n".encode())
    await response.write_eof()
    return response


def _verb(name: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        act = getattr(request.app[_SUPERVISOR], name)
        return await _run_response(request, await act(await _run(request)))

    return handle


async def _run(request: web.Request) -> str:
    return await _owned(request, parse_run_id(request.match_info["run"], "run"))


async def _owned(request: web.Request, run: str) -> str:
    """The run, if the caller may see it; operators also name runs that only checkpoints remember."""
    if request.app[_TENANCY].caller:
        request.app[_TENANCY].check_owner(await request.app[_STORE].get(run))
    return run


async def _run_response(request: web.Request, record: RunRecord, status: int = 200) -> web.Response:
    return web.json_response(run_json(record, await request.app[_STORE].step(record.run)), status=status)
