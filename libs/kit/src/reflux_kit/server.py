"""The one server main: gRPC, HTTP, health, signals, drain, exit codes."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import generate_latest
from pydantic import ValidationError

from reflux_kit import logs, telemetry
from reflux_kit.calls import CallInterceptor
from reflux_kit.errors import StartupError
from reflux_kit.settings import ServiceSettings

log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
Settings = TypeVar("Settings", bound=ServiceSettings)


@dataclass(frozen=True)
class Mount:
    """A servicer, how to register it, and the full service name that health reports."""

    servicer: object
    register: Callable[[Any, grpc.aio.Server], None]
    name: str


HttpService = Callable[[str, int], AbstractAsyncContextManager[int]]
"""Serves HTTP on (host, port) until it is left and yields the bound port; raises `OSError` when it cannot be bound. It
answers /metrics and /healthz itself."""


@dataclass(frozen=True)
class Service:
    """What a process serves: gRPC services and, when `http_listen` is set, HTTP by aiohttp or by its own server."""

    mounts: tuple[Mount, ...]
    http: web.Application | HttpService | None = None
    attend: "Callable[[Bound], AbstractAsyncContextManager[object]] | None" = None
    """Entered when the addresses are bound, left before they close: registration of a process that binds port 0."""


@dataclass(frozen=True)
class Bound:
    """Where peers reach a running service; `http` is empty when it serves none."""

    grpc: str
    http: str


@asynccontextmanager
async def running(service: Service, settings: ServiceSettings) -> AsyncIterator[Bound]:
    """Serves until the block ends. Tests use this too. Raises `StartupError` when an address cannot be bound."""
    for address in filter(None, (settings.listen, settings.http_listen)):
        if address.rpartition(":")[0] not in _LOOPBACK and not settings.stack_secret:
            raise StartupError(f"{address} is beyond loopback: set REFLUX_STACK_SECRET or listen on 127.0.0.1")
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(_http(service, settings)) if settings.http_listen else ""
        grpc_address = await stack.enter_async_context(_grpc(service, settings))
        bound = Bound(_reachable(grpc_address, settings), _reachable(http, settings))
        if service.attend is not None:
            await stack.enter_async_context(service.attend(bound))
        yield bound


def _reachable(address: str, settings: ServiceSettings) -> str:
    """The bound address under the name that peers know this machine by."""
    if not address or not settings.advertise_host:
        return address
    return f"{settings.advertise_host}:{address.rpartition(':')[2]}"


@asynccontextmanager
async def _grpc(service: Service, settings: ServiceSettings) -> AsyncIterator[str]:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_mib << 20),
        # Our clients ping every 30 s; a server allows one in 5 minutes on a silent stream and then hangs up.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
    server = grpc.aio.server(interceptors=[CallInterceptor(settings.stack_secret)], options=options)
    status = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for mount in service.mounts:
        mount.register(mount.servicer, server)
    _check_free(settings.listen)
    try:
        port = server.add_insecure_port(settings.listen)
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {settings.listen}: the port is in use or the address is not ours"
        ) from None
    await server.start()
    for name in ("", *(mount.name for mount in service.mounts)):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield f"{settings.listen.rpartition(':')[0]}:{port}"
    finally:
        await status.enter_graceful_shutdown()
        await server.stop(settings.drain_seconds)


def _check_free(address: str) -> None:
    """Binds once by hand: gRPC's own failure writes lines of its core to stderr and does not say what is wrong."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError, OverflowError) as error:
            detail = error.strerror if isinstance(error, OSError) else "not host:port"
            raise StartupError(f"cannot listen on {address}: {detail}") from None


@asynccontextmanager
async def _http(service: Service, settings: ServiceSettings) -> AsyncIterator[str]:
    own = service.http or web.Application()
    listening = _by_aiohttp(own, settings) if isinstance(own, web.Application) else own
    host, _, port = settings.http_listen.rpartition(":")
    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(listening(host.strip("[]"), int(port)))
        except OSError as error:
            raise StartupError(f"cannot listen on {settings.http_listen}: {error.strerror}") from None
        yield f"{host}:{bound}"


def _by_aiohttp(app: web.Application, settings: ServiceSettings) -> HttpService:
    paths = {resource.canonical for resource in app.router.resources()}
    if "/metrics" not in paths:
        app.router.add_get("/metrics", _metrics)
    if "/healthz" not in paths:
        app.router.add_get("/healthz", _healthz)
    app.middlewares.insert(0, _traced)

    @asynccontextmanager
    async def listening(host: str, port: int) -> AsyncIterator[int]:
        runner = web.AppRunner(app, shutdown_timeout=settings.drain_seconds, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    return listening


@web.middleware
async def _traced(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    """The caller's trace for the time of the request; one task serves all requests of a connection."""
    with telemetry.joined(request.headers):
        return await handler(request)


async def _metrics(_request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": "text/plain; version=0.0.4"})


async def _healthz(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def serve(
    name: str, settings_type: type[Settings], build: Callable[[Settings], AbstractAsyncContextManager[Service]]
) -> None:
    """Runs a service until SIGTERM or SIGINT. `build` owns the service's resources.

    Exits with status 2 and one line on stderr when the service cannot start.
    """
    try:
        settings = settings_type()
        logs.setup(name, settings.log_json)
        ends = settings.otlp_endpoint
        provider = telemetry.setup(name, state_dir=settings.state_dir, otlp_endpoint=ends, ratio=settings.trace_ratio)
        asyncio.run(_serve(name, settings, build))
        if provider is not None:
            provider.shutdown()
    except ValidationError as error:
        first = error.errors()[0]
        _give_up(name, f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except StartupError as error:
        _give_up(name, str(error))


async def _serve(
    name: str, settings: Settings, build: Callable[[Settings], AbstractAsyncContextManager[Service]]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with build(settings) as service, running(service, settings) as bound:
        log.info("%s serves gRPC on %s%s", name, bound.grpc, f" and HTTP on {bound.http}" if bound.http else "")
        await stop.wait()


def _give_up(name: str, message: str) -> None:
    print(f"reflux-{name}: {message}", file=sys.stderr)
    sys.exit(2)
