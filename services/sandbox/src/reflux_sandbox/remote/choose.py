"""Opens the places that the settings name and finds the place of a verifier."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.remote.base import Backend
from reflux_sandbox.remote.folder import FolderBackend
from reflux_sandbox.remote.http import HttpBackend
from reflux_sandbox.remote.ray import RayBackend
from reflux_sandbox.remote.settings import BackendName, RemoteSettings
from reflux_sandbox.remote.slurm import SlurmBackend

log = logging.getLogger(__name__)


class Places:
    """Where jobs of each verifier run."""

    def __init__(self, settings: RemoteSettings, backends: dict[BackendName, Backend]) -> None:
        self._routes: dict[str, BackendName] = {**settings.routes, **dict.fromkeys(settings.http, "http")}
        self._backends = backends

    @property
    def verifiers(self) -> list[VerifierInfo]:
        """Verifiers that only a remote place has."""
        return [info for backend in self._backends.values() for info in backend.verifiers]

    def route(self, info: VerifierInfo) -> Backend | None:
        """The place of a verifier; None for one that runs in children of this service."""
        name = self._routes.get(info.name) or self._routes.get(info.fidelity)
        return self._backends[name] if name else None


@asynccontextmanager
async def open_places(settings: RemoteSettings, node: dict[str, Any]) -> AsyncIterator[Places]:
    """Starts every backend that has settings. Raises StartupError."""
    backends: dict[BackendName, Backend] = {}
    if settings.folder:
        backends["folder"] = FolderBackend(settings.folder, node)
    if settings.slurm:
        backends["slurm"] = SlurmBackend(settings.slurm, node)
    if settings.ray:
        backends["ray"] = RayBackend(settings.ray, node)
    if settings.http:
        backends["http"] = HttpBackend(settings.http)
    async with AsyncExitStack() as stack:
        for name, backend in backends.items():
            stack.push_async_callback(backend.close)
            await backend.start()
            log.info("verification jobs can go to %s", name)
        yield Places(settings, backends)
