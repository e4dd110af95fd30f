"""Entry point of the sandbox: settings in, service out."""

import socket
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from reflux.sandbox.v1.sandbox_service_pb2_grpc import add_SandboxServiceServicer_to_server
from reflux_kit.redis import open_redis
from reflux_kit.server import Mount, Service, serve
from reflux_sandbox import metrics
from reflux_sandbox.code_runner import CodeRunner
from reflux_sandbox.dispatcher import Dispatcher
from reflux_sandbox.hold_back import holding_back
from reflux_sandbox.intake import Intake
from reflux_sandbox.isolation.choose import open_isolation
from reflux_sandbox.keys import AnswerKeys
from reflux_sandbox.ladder.mount import open_ladders
from reflux_sandbox.remote.choose import open_places
from reflux_sandbox.remote.node import node_values
from reflux_sandbox.servicer import MOST_WATCHERS, SERVICE_NAME, SandboxServicer
from reflux_sandbox.sessions.mount import open_sessions
from reflux_sandbox.settings import SandboxSettings
from reflux_sandbox.store import VerificationStore


def identity(settings: SandboxSettings) -> str:
    """Equal across restarts of the same service; with a port that changes nobody can tell, and leases run out."""
    if settings.identity:
        return settings.identity
    fixed = not settings.listen.endswith(":0")
    return f"{socket.gethostname()}/{settings.listen if fixed else uuid.uuid4().hex}"


@asynccontextmanager
async def build(settings: SandboxSettings) -> AsyncIterator[Service]:
    """Owns Redis, the isolation mechanism, places elsewhere and the dispatcher."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_redis(settings.redis_url))
        watching = await stack.enter_async_context(open_redis(settings.redis_url, max_connections=MOST_WATCHERS))
        folder = settings.state_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="reflux-cache-"))
        cache = Path(folder) / "cache"  # the trainer's too: what a task builds is built once
        cache.mkdir(parents=True, exist_ok=True)
        options = settings.isolation_options(str(cache.resolve()))
        isolation, reasons = await stack.enter_async_context(open_isolation(settings.isolation, **options))
        metrics.observe(isolation)
        store = VerificationStore(client, identity(settings), settings.store_limits(), watching=watching)
        places = await stack.enter_async_context(open_places(settings.remote, node_values(settings)))
        limits = settings.dispatch_limits()
        work = Dispatcher(store, isolation, limits, route=places.route, elsewhere=places.verifiers)
        dispatcher = await stack.enter_async_context(work)
        intake = Intake(store, dispatcher, AnswerKeys(isolation, settings.child_memory_bytes))
        runner = CodeRunner(isolation, settings.code_concurrency)
        servicer = SandboxServicer(settings, store, dispatcher, runner, isolation, intake, reasons)
        ladders = await stack.enter_async_context(open_ladders(settings, client, store, dispatcher, intake))
        sessions = await stack.enter_async_context(open_sessions(settings, isolation))
        await stack.enter_async_context(holding_back(settings, store.depths))
        yield Service((Mount(servicer, add_SandboxServiceServicer_to_server, SERVICE_NAME), ladders, sessions))


def main() -> None:
    """Runs the service until SIGTERM."""
    serve("sandbox", SandboxSettings, build)


if __name__ == "__main__":
    main()
