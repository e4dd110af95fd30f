"""The routes of the Tinker API that list and tend what there is: sessions, runs, checkpoints, and what is refused."""

import zlib
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from reflux_kit.errors import InvalidRequest
from reflux_trainer.tinker import bodies, listing
from reflux_trainer.tinker.door import Door

DOOR = web.AppKey("door", Door)
TENANT = web.RequestKey("tenant", str)
_CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"


def add_rest_routes(router: web.UrlDispatcher) -> None:
    """Adds them; the application knows the door, requests know their tenant."""
    router.add_get("/get_server_capabilities", _capabilities)
    router.add_get("/auth/apikey/me", _whoami)
    router.add_post("/sessions/{session}/finish", _finish)
    router.add_get("/sessions", _sessions)
    router.add_get("/sessions/{session}", _session)
    router.add_get("/samplers/{sampler}", _sampler)
    router.add_get("/training_runs", _training_runs)
    router.add_get("/training_runs/{model}", _training_run)
    router.add_get("/training_runs/{model}/checkpoints", _model_checkpoints)
    router.add_delete(_CHECKPOINT, _delete_checkpoint)
    router.add_post(f"{_CHECKPOINT}/publish", _publish)
    router.add_delete(f"{_CHECKPOINT}/publish", _publish)
    router.add_put(f"{_CHECKPOINT}/ttl", _expire)
    router.add_get("/checkpoints", _checkpoints)
    for method, path, what, instead in _REFUSED:
        router.add_route(method, path, _refused(what, instead))


_REFUSED = (
    ("POST", "/create_custom_loss", "a custom loss on the server", "forward_backward_custom computes it in the client"),
    (
        "POST",
        "/save_weights_external",
        "an export to another store",
        "save_weights, whose objects are in the stack's store",
    ),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", "signed addresses of weights", "load them by their tinker:// path"),
    ("POST", "/sessions/search", "a search of sessions", "GET sessions lists them"),
    ("GET", "/sessions/{session}/trace_export", "an export of traces", "`reflux trace` and OpenTelemetry show them"),
    ("PUT", "/sessions/{session}/project", "a project of a session", "tenants keep sessions apart"),
    ("GET", "/billing/usage/events", "billing", "/metrics counts what was done"),
    ("GET", "/billing/usage/checkpoints/current", "billing", "GET checkpoints tells their sizes"),
    ("GET", "/audit", "an audit log", "the trainer's log names each operation"),
    ("DELETE", "/auth/apikey/me", "removing a key", "take it out of REFLUX_TINKER_KEYS_FILE"),
)
"""Method, path, what is refused, what to do."""


async def body_of(request: web.Request) -> bytes:
    """The body, unpacked by the server; bounded, because a small packed one may be large."""
    limit, parts, size = request.app[DOOR].settings.max_body_bytes, [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size)
        parts.append(part)
    return b"".join(parts)


async def _capabilities(request: web.Request) -> web.Response:
    return web.json_response(listing.capabilities([desk.base for desk in request.app[DOOR].desks.all()]))


async def _finish(request: web.Request) -> web.Response:
    await body_of(request)
    await request.app[DOOR].finish_session(request[TENANT], request.match_info["session"])
    return web.json_response({})


async def _sessions(request: web.Request) -> web.Response:
    found = await request.app[DOOR].catalog.members("sessions", request[TENANT])
    return web.json_response({"sessions": listing.page(found, *_window(request, 20))[0]})


async def _session(request: web.Request) -> web.Response:
    catalog = request.app[DOOR].catalog
    session = await catalog.session(request[TENANT], request.match_info["session"])
    document = {
        "training_run_ids": await catalog.members("models", session.session_id),
        "sampler_ids": await catalog.members("samplers", session.session_id),
        "user_metadata": {key: str(value) for key, value in (session.user_metadata or {}).items()},
        "display_name": session.display_name,
    }
    return web.json_response(document)


async def _sampler(request: web.Request) -> web.Response:
    sampler = await request.app[DOOR].catalog.sampler(request[TENANT], request.match_info["sampler"])
    document = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
    return web.json_response(document)


async def _training_runs(request: web.Request) -> web.Response:
    found = await request.app[DOOR].catalog.members("models", request[TENANT])
    part, cursor = listing.page(found, *_window(request, 20))
    runs = [await _run_document(request, model_id) for model_id in part]
    return web.json_response({"training_runs": runs, "cursor": cursor})


async def _training_run(request: web.Request) -> web.Response:
    return web.json_response(await _run_document(request, request.match_info["model"]))


async def _run_document(request: web.Request, model_id: str) -> dict[str, Any]:
    door = request.app[DOOR]
    model = await door.catalog.model(request[TENANT], model_id)
    return listing.training_run(model, await door.progress(model), await door.catalog.checkpoints(model_id))


async def _model_checkpoints(request: web.Request) -> web.Response:
    catalog = request.app[DOOR].catalog
    model = await catalog.model(request[TENANT], request.match_info["model"])
    entries = [listing.checkpoint_entry(each) for each in await catalog.checkpoints(model.model_id)]
    return web.json_response({"checkpoints": entries, "cursor": None})


async def _checkpoints(request: web.Request) -> web.Response:
    catalog = request.app[DOOR].catalog
    models = await catalog.members("models", request[TENANT])
    found = [each for model_id in models for each in await catalog.checkpoints(model_id)]
    found.sort(key=lambda each: each.created_at, reverse=True)
    part, cursor = listing.page(found, *_window(request, 100))
    return web.json_response({"checkpoints": [listing.checkpoint_entry(each) for each in part], "cursor": cursor})


def _address(request: web.Request) -> str:
    info = request.match_info
    return f"tinker://{info['model']}/{info['kind']}/{info['name']}"


async def _delete_checkpoint(request: web.Request) -> web.Response:
    await request.app[DOOR].shelf.delete(request[TENANT], _address(request))
    return web.json_response({})


async def _publish(request: web.Request) -> web.Response:
    public = request.method == "POST"
    await request.app[DOOR].shelf.publish(request[TENANT], _address(request), public=public)
    return web.json_response({})


async def _expire(request: web.Request) -> web.Response:
    body = bodies.parse(bodies.Expiry, await body_of(request))
    await request.app[DOOR].shelf.expire(request[TENANT], _address(request), body)
    return web.json_response({})


async def _whoami(request: web.Request) -> web.Response:
    """What `tinker auth login` shows and keeps: a key is known by its tenant, which has no address of mail."""
    tenant = request[TENANT]
    details = {"org_details": {"name": "reflux"}, "user_details": {"email": tenant}}
    number = zlib.crc32(tenant.encode())
    return web.json_response({"key_id": number, "name": tenant, "note": "", "details": details})


def _refused(what: str, instead: str) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        raise InvalidRequest(f"{what} is not served here: {instead}")

    return handle


def _window(request: web.Request, size: int) -> tuple[int, int]:
    """Offset and limit of a list."""
    try:
        offset, limit = int(request.query.get("offset", "0")), int(request.query.get("limit", str(size)))
    except ValueError:
        raise InvalidRequest("offset and limit must be numbers", field="offset") from None
    return max(0, offset), limit
