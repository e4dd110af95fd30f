"""The routes of the Tinker API below /api/v1: who calls, which verb, and errors as the SDK sorts them."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from redis.exceptions import RedisError

from reflux_kit.errors import ServiceError
from reflux_storage.errors import StorageError
from reflux_trainer.tinker import bodies, listing, names
from reflux_trainer.tinker.door import Door, Pending
from reflux_trainer.tinker.futures import PROTOBUF
from reflux_trainer.tinker.keys import Tenants
from reflux_trainer.tinker.operations import OPTIM, SAMPLER, SAVE
from reflux_trainer.tinker.rest import DOOR, TENANT, add_rest_routes, body_of

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
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
Verb = Callable[[Door, str, bytes], Awaitable[Any]]


def tinker_application(door: Door, tenants: Tenants) -> web.Application:
    """The sub-application; it authenticates by `x-api-key` and answers in the SDK's shapes."""
    app = web.Application(middlewares=[_guard(tenants)])
    app[DOOR] = door
    router = app.router
    for path, verb in _VERBS.items():
        router.add_post(f"/{path}", _handler(verb))
    client = {
        "proto_compress_fwdbwd": True,
        "sample_no_retries": False,
        "sample_use_retrieve_futures": door.settings.batch_polls,
    }
    for path, document in (("client/config", client), ("client/dynamic_config", _DYNAMIC_CONFIG)):
        router.add_post(f"/{path}", _fixed(document))
    router.add_get("/healthz", _fixed({"status": "ok"}))
    router.add_post("/telemetry", _fixed({"status": "accepted"}))
    router.add_post("/retrieve_future", _retrieve)
    add_rest_routes(router)
    return app


def _guard(tenants: Tenants) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path != _OPEN:
                request[TENANT] = tenants.of(request.headers.get("x-api-key"))
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


def _handler(verb: Verb) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await verb(request.app[DOOR], request[TENANT], await body_of(request)))

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
    return listing.weights_info(await door.catalog.readable_checkpoint(tenant, uri))


async def _retrieve_ended(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    completions, cursor = await door.ended(tenant, bodies.parse(bodies.Ends, raw))
    return {"completions": completions, "cursor": cursor}


async def _join_sampling_session(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    sampler = await door.catalog.sampler(tenant, bodies.parse(bodies.JoinSamplingSession, raw).sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": await door.catalog.join_sampler(sampler.sampler_id)}


async def _copy_weights(door: Door, tenant: str, raw: bytes) -> dict[str, Any]:
    return {"tinker_path": await door.shelf.copy(tenant, bodies.parse(bodies.CopyWeights, raw))}


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
    "retrieve_futures": _retrieve_ended,
    "join_sampling_session": _join_sampling_session,
    "copy_weights": _copy_weights,
}


async def _retrieve(request: web.Request) -> web.Response:
    request_id = bodies.parse(bodies.FutureId, await body_of(request)).request_id
    found = await request.app[DOOR].retrieve(request[TENANT], request_id)
    if isinstance(found, Pending):
        state = "paused_capacity" if found.paused else "active"
        body = {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": found.reason}
        return web.json_response(body)
    outcome = found.outcome
    assert outcome is not None
    if outcome.failed:
        return web.json_response({"error": outcome.body.decode(), "category": outcome.failed})
    return web.Response(body=outcome.body, content_type=PROTOBUF if outcome.type == PROTOBUF else "application/json")
