"""Entry point of `reflux-engine-adapter`: a running vLLM or SGLang in, one replica out."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from reflux_inference_gateway.engine.registration import GatewayLink
from reflux_inference_gateway.engine.replica import Fatal
from reflux_inference_gateway.foreign.base import WeightSink
from reflux_inference_gateway.foreign.follower import Follower, following
from reflux_inference_gateway.foreign.http_client import EngineHttp, engine_http
from reflux_inference_gateway.foreign.replica import Description, engine_layout
from reflux_inference_gateway.foreign.settings import AdapterSettings
from reflux_inference_gateway.foreign.sglang import SglangDisk
from reflux_inference_gateway.foreign.vllm import VllmSink
from reflux_kit.errors import StartupError
from reflux_kit.server import Bound, Service, serve
from reflux_transfer.client.puller import Puller
from reflux_transfer.client.wire import scope_of
from reflux_transfer.handles import Scope
from reflux_transfer.probe.paths import PathBook
from reflux_transfer.registry import open_backend
from reflux_weightplan.spec import SpecLayout


def new_sink(settings: AdapterSettings, model: Path, http: EngineHttp, scope: Scope, paths: PathBook) -> WeightSink:
    """The way to the engine that the settings name; vLLM's workers test paths of their own."""
    if settings.engine == "vllm":
        return VllmSink(http, scope)
    puller = Puller(scope, partial(open_backend, settings=settings.transfer), paths)
    if settings.engine == "sglang":
        return SglangDisk(http, model, settings.scratch, puller)
    # Only this way needs torch: an adapter of the others runs without it.
    from reflux_inference_gateway.foreign.sglang_distributed import SglangDistributed

    host = settings.advertise_host or urlsplit(settings.engine_url).hostname or "127.0.0.1"
    return SglangDistributed(http, host, settings.engine_ranks, puller)


@asynccontextmanager
async def build(settings: AdapterSettings) -> AsyncIterator[Service]:
    """Waits for the engine, then owns its sink and the links to gateway and broker."""
    if settings.model is None or not settings.engine_url:
        raise StartupError("REFLUX_ENGINE_ADAPTER_MODEL and REFLUX_ENGINE_ADAPTER_ENGINE_URL must be set")
    model_id = settings.model_id or settings.run or settings.model.resolve().name
    layout = engine_layout(settings.model, settings.weight_dtype)
    fatal = Fatal()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(engine_http(settings.engine_url, settings.api_key))
        paths = PathBook(settings.transfer)
        sink = new_sink(settings, settings.model, http, scope_of(model_id, settings.stack_secret), paths)
        await http.until_up(sink.up_route, settings.start_seconds)
        stack.push_async_callback(sink.close)
        await sink.open(layout)

        def attend(_bound: Bound) -> AbstractAsyncContextManager[None]:
            return _attended(settings, model_id, layout, sink, paths, fatal)

        yield Service((), attend=attend)
    if fatal.reason:
        raise SystemExit(1)


@asynccontextmanager
async def _attended(
    settings: AdapterSettings, model_id: str, layout: SpecLayout, sink: WeightSink, paths: PathBook, fatal: Fatal
) -> AsyncIterator[None]:
    follower = Follower(sink)
    describe = Description(settings, model_id, follower)
    link = GatewayLink(settings, describe)
    follower.announce = link.announce
    async with (
        following(settings, model_id, describe.name, layout, follower, paths, settings.watch_seconds, fatal),
        link.running(),
    ):
        yield


def main() -> None:
    """Runs the adapter until SIGTERM, or until its engine or the broker make going on pointless (status 1)."""
    serve("engine-adapter", AdapterSettings, build)


if __name__ == "__main__":
    main()
