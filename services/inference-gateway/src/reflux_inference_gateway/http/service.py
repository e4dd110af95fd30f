"""The door as the kit serves it: settings in, a listening server out."""

import logging
import resource
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reflux_inference_gateway.dispatch import Dispatcher
from reflux_inference_gateway.http.access import Access
from reflux_inference_gateway.http.app import OpenAiDoor
from reflux_inference_gateway.http.keys import load_keys
from reflux_inference_gateway.http.server import HttpLimits, HttpServer
from reflux_inference_gateway.http.upstream import Upstreams
from reflux_inference_gateway.settings import GatewaySettings
from reflux_kit.errors import StartupError
from reflux_kit.server import HttpService

log = logging.getLogger(__name__)

_OTHER_FILES = 256


def openai_service(dispatcher: Dispatcher, settings: GatewaySettings) -> HttpService:
    """The OpenAI door; raises StartupError when the keys or the certificate cannot be used."""
    started_seconds = time.monotonic()
    access = Access(settings.stack_secret, load_keys(settings.api_keys_file))
    tls = _tls(settings)
    limits = HttpLimits(
        max_connections=_affordable(settings.max_connections),
        max_body_bytes=settings.max_body_bytes,
        max_held_bytes=settings.max_held_bytes,
        idle_seconds=settings.idle_seconds,
        head_seconds=settings.head_seconds,
        body_seconds=settings.body_seconds,
        request_seconds=settings.request_seconds,
    )

    @asynccontextmanager
    async def listening(host: str, port: int) -> AsyncIterator[int]:
        upstreams = Upstreams()
        door = OpenAiDoor(dispatcher, upstreams, access, settings, started_seconds)
        server = HttpServer(door, limits, upstreams.sweep)
        try:
            async with server.listening(host, port, settings.drain_seconds, tls) as bound:
                yield bound
        finally:
            upstreams.close()

    return listening


def _affordable(max_connections: int) -> int:
    """Raises the limit of open files as far as it may; each connection may need one more towards a replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * max_connections + _OTHER_FILES
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    affordable = max(1, min(max_connections, (limit - _OTHER_FILES) // 2))
    if affordable < max_connections:
        log.info("%d HTTP connections at most: the process may open %d files", affordable, limit)
    return affordable


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if not settings.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    except OSError as error:  # ssl.SSLError is one
        raise StartupError(f"the certificate {settings.tls_certificate} cannot be used: {error.strerror}") from None
    return context
