"""Grades requests on the machine where it runs, in children of an isolation mechanism of its own."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from reflux_sandbox.execution import GradeSession, SessionLost
from reflux_sandbox.isolation.base import Isolation
from reflux_sandbox.isolation.choose import open_isolation
from reflux_sandbox.settings import SandboxSettings

NODE_FIELDS = (
    "isolation",
    "child_memory_bytes",
    "child_processes",
    "child_disk_bytes",
    "tasks",
    "graders",
    "import_folders",
)
"""Settings of the service that also hold for children on other machines."""
_MOST_CPU_SECONDS = 7 * 86400


def node_values(settings: SandboxSettings) -> dict[str, Any]:
    """What a machine elsewhere needs to know, as JSON; no secret is among it."""
    return settings.model_dump(mode="json", include=set(NODE_FIELDS))


@asynccontextmanager
async def open_node(values: dict[str, Any], cache_folder: str, jobs: int = 1) -> AsyncIterator["NodeGrader"]:
    """Starts warm children for `jobs` at one time. Raises StartupError when this machine cannot isolate them."""
    settings = SandboxSettings(**values, idle_children=1)
    async with AsyncExitStack() as stack:
        folder = cache_folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="reflux-cache-"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        options = settings.isolation_options(str(Path(folder).resolve())) | {"most_children": jobs + 1}
        isolation, _ = await stack.enter_async_context(open_isolation(settings.isolation, **options))
        yield NodeGrader(isolation, settings.child_memory_bytes)


class NodeGrader:
    """Answers like a child: {"grades": [...]} or {"error": kind, "message": text}."""

    def __init__(self, isolation: Isolation, memory_bytes: int) -> None:
        self._isolation = isolation
        self._memory_bytes = memory_bytes
        self._infos = {info.name: info for info in isolation.verifiers}

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request (verifier, version, payload, answers). Cancelling it kills the child."""
        name, version = request["verifier"], request["version"]
        info = self._infos.get(name)
        if info is None or info.version != version:
            has = f"has version {info.version}" if info else "is not installed"
            return {"error": "unavailable", "message": f"{name} {has} on this node, the service wants {version}"}
        limits = (self._memory_bytes, _MOST_CPU_SECONDS)
        session = GradeSession(self._isolation, info.profile, *limits, family=info.family)
        try:
            async with session:
                return await session.grade(name, request["payload"], list(request["answers"]))
        except SessionLost as error:
            return {"error": "crash", "message": str(error)}
