"""Puts sessions into the service: the registry and its servicer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from reflux.sandbox.v1.session_service_pb2_grpc import add_SandboxSessionServiceServicer_to_server
from reflux_kit.server import Mount
from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.sessions.registry import Sessions
from reflux_sandbox.sessions.servicer import SERVICE_NAME, SessionServicer
from reflux_sandbox.settings import SandboxSettings


@asynccontextmanager
async def open_sessions(settings: SandboxSettings, isolation: Isolation) -> AsyncIterator[Mount]:
    """Ends all sessions when it is left."""
    async with Sessions(isolation, settings.session_caps()) as sessions:
        yield Mount(SessionServicer(settings, sessions), add_SandboxSessionServiceServicer_to_server, SERVICE_NAME)
