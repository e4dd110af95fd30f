"""Entry point of `reflux-trainer`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from reflux.trainer.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from reflux_kit.errors import StartupError
from reflux_kit.redis import open_redis
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_trainer.http import application
from reflux_trainer.peers import open_peers
from reflux_trainer.servicer import SERVICE_NAME, TrainerServicer
from reflux_trainer.settings import TrainerSettings
from reflux_trainer.store import RunStore
from reflux_trainer.supervisor import Supervisor
from reflux_trainer.tenancy import load_tenancy
from reflux_trainer.tinker.opening import open_tinker


@asynccontextmanager
async def build(settings: TrainerSettings) -> AsyncIterator[Service]:
    """Owns Redis, the channels and the running attempts."""
    try:
        settings.runs_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"the folder of runs {settings.runs_folder} cannot be made ({error.strerror}); set REFLUX_TRAINER_RUNS_DIR"
        ) from None
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(open_redis(settings.redis_url))
        peers = await stack.enter_async_context(open_peers(redis, settings))
        store = RunStore(redis)
        tenancy = load_tenancy(settings.tenants_file)
        supervisor = Supervisor(peers, store, tenancy)
        servicer = TrainerServicer(supervisor, store, peers.learners, tenancy)
        mount = Mount(servicer, add_TrainerServiceServicer_to_server, SERVICE_NAME)
        # Runs are taken up when the addresses are ours, not before: see Supervisor.
        app = application(supervisor, store, settings.stack_secret, tenancy)
        tinker = open_tinker(peers, settings)
        tinker.mount(app)

        @asynccontextmanager
        async def attend(_bound: Bound) -> AsyncIterator[None]:
            async with supervisor, tinker.serving():
                yield

        yield Service(mounts=(mount,), http=app, attend=attend)


def main() -> None:
    """Console script."""
    serve("trainer", TrainerSettings, build)


if __name__ == "__main__":
    main()
