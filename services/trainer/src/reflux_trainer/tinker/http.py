"""The routes of the Tinker API below /api/v1: who calls, which verb, and errors as the SDK sorts them."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from redis.exceptions import RedisError

from reflux_kit.errors import InvalidRequest, ServiceError
from reflux_storage.errors import StorageError
from reflux_trainer.tinker import bodies, listing, names
from reflux_trainer.tinker.door import Door, Pending
from reflux_trainer.tinker.futures import PROTOBUF
from reflux_trainer.tinker.keys import Tenants
from reflux_trainer.tinker.operations import OPTIM, SAMPLER, SAVE

PREFIX = "/api/v1"
_OPEN = f"{PREFIX}/healthz"
_STATUS = {
    "INVALID_REQUEST": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "WRONG_STATE": 409,
    "CONFLICT": 409,
    "RESULT_GONE": 410,
    "CAPACITY_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_PASSED": 504,
}
_CLIENT_CONFIG = {"proto_compress_fwdbwd": True, "sample_no_retries": False, "sample_use_retrieve_futures": False}
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
_DOOR = web.AppKey("door", Door)
_TENANT = web.RequestKey("tenant", str)
Verb = Callable[[Door, str, bytes], Awaitable[Any]]


def tinker_application(door: Door, tenants: Tenants) -> web.Application:
    """The sub-application; it authenticates by `x-api-key` and answers in the SDK's shapes."""
    app = web.Application(middlewares=[_guard(tenants)])
    app[_DOOR] = door
    router = app.router
    for path, verb in _VERBS.items():
        router.add_post(f"/{path}", _handler(verb))
    for path, document in (("client/config", _CLIENT_CONFIG), ("client/dynamic_config", _DYNAMIC_CONFIG)):
        router.add_post(f"/{path}", _fixed(document))
    router.add_get("/healthz", _fixed({"status": "ok"}))
    router.add_post("/telemetry", _fixed({"status": "accepted"}))
    router.add_get("/get_server_capabilities", _capabilities)
    router.add_post("/retrieve_future", _retrieve)
    router.add_post("/sessions/{session}/finish", _finish)
    router.add_get("/sessions", _sessions)
    router.add_get("/sessions/{session}", _session)
    router.add_get("/samplers/{sampler}", _sampler)
    router.add_get("/training_runs", _training_runs)
    router.add_get("/training_runs/{model}", _training_run)
    router.add_get("/training_runs/{model}/checkpoints", _model_checkpoints)
    router.add_delete("/training_runs/{model}/checkpoints/{kind}/{name}", _delete_checkpoint)
    router.add_get("/checkpoints", _checkpoints)
    return app


def _guard(tenants: Tenants) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != _OPEN:
                request[_TENANT] = tenants.of(request.headers.get("x-api-key"))
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")
        except ServiceError as error:
            return _error(_STATUS.get(error.reason, 500), str(error))
        except (RedisError, StorageError) as error:
            return _error(503, f"the state store does not answer ({type(error).__name__})")

    return guard


def _error(status: int, text: str) -> web.Response:
    category = "user" if status < 500 and status != 429 else "server"
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.json_response({"error": text, "detail": text, "category": category}, status=status, headers=headers)


async def _body(request: web.Request) -> bytes:
    """The body, unpacked by the server; bounded, because a small packed one may be large."""
    limit, parts, size = request.app[_DOOR].settings.max_body_bytes, [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size)
        parts.append(part)
    return b"".join(parts)


def _handler(verb: Verb) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await verb(request.app[_DOOR], request[_TENANT], await _body(request)))

    return handle


def _fixed(document: dict[str, Any]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        return web.json_response(document)

    return handle


def _future(request_id: str, model_id: str | None) -> dict[str, Any]:
    return {"request_id": request_id, "model_id": model_id}


async def _create_session(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    session = await door.create_session(tenant, bodies.parse(bodies.CreateSession, raw))
    return {"type": "create_session", "session_id": session.session_id}


async def _heartbeat(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    await door.heartbeat(tenant, bodies.parse(bodies.SessionHeartbeat, raw).session_id)
    return {"type": "session_heartbeat"}


async def _create_model(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    request_id = await door.create_model(tenant, raw)
    return _future(request_id, names.split_request_id(request_id)[0])


async def _get_info(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    model = await door.catalog.model(tenant, bodies.parse(bodies.GetInfo, raw).model_id)
    base = door.desks.of(model.base_model).base
    return listing.model_info(model, base, door.settings.tokenizer_ids.get(base.name, base.name))


async def _forward_backward(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return _future(*await door.forward_backward(tenant, raw))


async def _optim_step(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return _future(*await door.operate(tenant, OPTIM, bodies.OptimStep, raw))


async def _save_weights(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return _future(*await door.operate(tenant, SAVE, bodies.SaveWeights, raw))


async def _save_weights_for_sampler(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return _future(*await door.operate(tenant, SAMPLER, bodies.SaveWeightsForSampler, raw))


async def _load_weights(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return _future(*await door.load_weights(tenant, raw))


async def _create_sampling_session(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    sampler = await door.create_sampler(tenant, bodies.parse(bodies.CreateSamplingSession, raw))
    return {"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id}


async def _asample(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    request_id, count = await door.sample(tenant, raw)
    return _future(request_id, None) | {"sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}


async def _cancel(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    await door.cancel(tenant, bodies.parse(bodies.FutureId, raw).request_id)
    return {}


async def _weights_info(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    uri = bodies.parse(bodies.TinkerPath, raw).tinker_path
    return listing.weights_info(await door.catalog.checkpoint(tenant, uri))


_VERBS: dict[str, Verb] = {
    "create_session": _create_session,
    "session_heartbeat": _heartbeat,
    "create_model": _create_model,
    "get_info": _get_info,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_for_sampler": _save_weights_for_sampler,
    "load_weights": _load_weights,
    "create_sampling_session": _create_sampling_session,
    "asample": _asample,
    "cancel_future": _cancel,
    "weights_info": _weights_info,
}


async def _retrieve(request: web.Request) -> web.Response:
    request_id = bodies.parse(bodies.FutureId, await _body(request)).request_id
    found = await request.app[_DOOR].retrieve(request[_TENANT], request_id)
    if isinstance(found, Pending):
        state = "paused_capacity" if found.paused else "active"
        body = {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": found.reason}
        return web.json_response(body)
    outcome = found.outcome
    assert outcome is not None
    if outcome.failed:
        return web.json_response({"error": outcome.body.decode(), "category": outcome.failed})
    return web.Response(body=outcome.body, content_type=PROTOBUF if outcome.type == PROTOBUF else "application/json")


async def _capabilities(request: web.Request) -> web.Response:
    return web.json_response(listing.capabilities([desk.base for desk in request.app[_DOOR].desks.all()]))


async def _finish(request: web.Request) -> web.Response:
    await _body(request)
    await request.app[_DOOR].finish_session(request[_TENANT], request.match_info["session"])
    return web.json_response({})


async def _sessions(request: web.Request) -> web.Response:
    found = await request.app[_DOOR].catalog.members("sessions", request[_TENANT])
    return web.json_response({"sessions": listing.page(found, *_window(request, 20))[0]})


async def _session(request: web.Request) -> web.Response:
    catalog = request.app[_DOOR].catalog
    session = await catalog.session(request[_TENANT], request.match_info["session"])
    document = {
        "training_run_ids": await catalog.members("models", session.session_id),
        "sampler_ids": await catalog.members("samplers", session.session_id),
        "user_metadata": {key: str(value) for key, value in (session.user_metadata or {}).items()},
        "display_name": session.display_name,
    }
    return web.json_response(document)


async def _sampler(request: web.Request) -> web.Response:
    sampler = await request.app[_DOOR].catalog.sampler(request[_TENANT], request.match_info["sampler"])
    document = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
    return web.json_response(document)


async def _training_runs(request: web.Request) -> web.Response:
    found = await request.app[_DOOR].catalog.members("models", request[_TENANT])
    part, cursor = listing.page(found, *_window(request, 20))
    runs = [await _run_document(request, model_id) for model_id in part]
    return web.json_response({"training_runs": runs, "cursor": cursor})


async def _training_run(request: web.Request) -> web.Response:
    return web.json_response(await _run_document(request, request.match_info["model"]))


async def _run_document(request: web.Request, model_id: str) -> dict[str, Any]:
    door = request.app[_DOOR]
    model = await door.catalog.model(request[_TENANT], model_id)
    return listing.training_run(model, await door.progress(model), await door.catalog.checkpoints(model_id))


async def _model_checkpoints(request: web.Request) -> web.Response:
    catalog = request.app[_DOOR].catalog
    model = await catalog.model(request[_TENANT], request.match_info["model"])
    entries = [listing.checkpoint_entry(each) for each in await catalog.checkpoints(model.model_id)]
    return web.json_response({"checkpoints": entries, "cursor": None})


async def _checkpoints(request: web.Request) -> web.Response:
    catalog = request.app[_DOOR].catalog
    models = await catalog.members("models", request[_TENANT])
    found = [each for model_id in models for each in await catalog.checkpoints(model_id)]
    found.sort(key=lambda each: each.created_at, reverse=True)
    part, cursor = listing.page(found, *_window(request, 100))
    return web.json_response({"checkpoints": [listing.checkpoint_entry(each) for each in part], "cursor": cursor})


async def _delete_checkpoint(request: web.Request) -> web.Response:
    info = request.match_info
    await request.app[_DOOR].delete_checkpoint(
        request[_TENANT], f"tinker://{info['model']}/{info['kind']}/{info['name']}"
    )
    return web.json_response({})


def _window(request: web.Request, size: int) -> tuple[int, int]:
    """Offset and limit of a list."""
    try:
        offset, limit = int(request.query.get("offset", "0")), int(request.query.get("limit", str(size)))
    except ValueError:
        raise InvalidRequest("offset and limit must be numbers", field="offset") from None
    return max(0, offset), limit
