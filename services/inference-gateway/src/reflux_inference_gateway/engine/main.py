"""Entry point of `reflux-engine`: model folder in, one replica out."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace

import torch

from reflux.inference_gateway.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from reflux_inference_gateway.engine import metrics
from reflux_inference_gateway.engine.attendance import Attendance
from reflux_inference_gateway.engine.core import EngineCore, Event
from reflux_inference_gateway.engine.handover import new_exchange
from reflux_inference_gateway.engine.holding import Holding, holding, layout_of
from reflux_inference_gateway.engine.http import EngineDoor
from reflux_inference_gateway.engine.legs import Legs
from reflux_inference_gateway.engine.loading import LoadedModel, core_options, load_model
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.replica import Description, Fatal
from reflux_inference_gateway.engine.served import CoreOptions
from reflux_inference_gateway.engine.servicer import SERVICE_NAME, EngineServicer
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.types import ModelLimits
from reflux_kit.errors import StartupError
from reflux_kit.server import Mount, Service, serve
from reflux_transfer.probe.choice import Choice, probe

_GIL_SWITCH_SECONDS = 0.0005


@asynccontextmanager
async def build(settings: EngineSettings) -> AsyncIterator[Service]:
    """Owns the model, the engine's thread, and the links to gateway and broker."""
    torch.set_num_threads(settings.threads)
    choice = None
    if settings.weights == "broker":
        choice = await asyncio.to_thread(probe, settings.transfer, settings.transport)
    elif settings.max_adapters:
        raise StartupError("REFLUX_ENGINE_MAX_ADAPTERS needs REFLUX_ENGINE_WEIGHTS=broker: adapters come from there")
    model = load_model(settings)
    options = core_options(settings, model.config)
    model_id = settings.model_id or settings.run or model.folder.resolve().name
    async with AsyncExitStack() as stack:
        held = None
        if choice and not settings.max_adapters:
            layout = layout_of(model.weights.params)
            held = stack.enter_context(holding(settings, choice, model.config, layout, options))
            model = replace(model, weights=held.adopt(model.weights.params))
        yield await stack.enter_async_context(_running(settings, model, options, model_id, held, choice))


@asynccontextmanager
async def _running(
    settings: EngineSettings,
    model: LoadedModel,
    options: CoreOptions,
    model_id: str,
    held: Holding | None,
    choice: Choice | None,
) -> AsyncIterator[Service]:
    def new_core(deliver: Callable[[str, Event], None]) -> EngineCore:
        return EngineCore(
            model.config,
            model.weights,
            options,
            deliver,
            eos_ids=model.eos_ids,
            decode=model.tokenizer.decode,
            settled=metrics.swapped,
        )

    fatal = Fatal()
    open_samples = options.max_rows + settings.max_waiting_samples
    engine = EngineLoop(new_core, max_open_samples=open_samples, on_failure=fatal)
    limits = ModelLimits(vocab_size=model.config.vocab_size, max_model_len=options.max_model_len)
    describe = Description(settings, model_id, options, engine)
    attendance = Attendance(settings, model_id, model.config, engine, describe, held, choice, fatal)
    dtype = model.weights.params["model.embed_tokens.weight"].dtype
    exchange = new_exchange(settings, model.config, dtype, model_id, choice)
    metrics.observe(engine, lambda: exchange.held_bytes)
    legs = Legs(engine, exchange)
    door = EngineDoor(engine, model.tokenizer, limits, model_id, settings.stack_secret, settings.max_body_bytes, legs)
    servicer = EngineServicer(engine, limits, describe, attendance, legs)
    mount = Mount(servicer, add_EngineServiceServicer_to_server, SERVICE_NAME)
    # The model stays for the life of the process; scanning it again and again costs tens of milliseconds.
    gc.collect()
    gc.freeze()
    async with engine:
        with closing(exchange):
            async with legs.expiring():
                yield Service((mount,), door.application(), attendance.attended)
    if fatal.reason:
        raise SystemExit(1)


def main() -> None:
    """Runs the engine until SIGTERM."""
    # Engine thread and event loop share the interpreter; the default of 5 ms would make each wait that long.
    sys.setswitchinterval(_GIL_SWITCH_SECONDS)
    serve("engine", EngineSettings, build)


if __name__ == "__main__":
    main()
