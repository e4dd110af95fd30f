"""Entry point of `reflux-engine`: model folder in, one replica out."""

import gc
import logging
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from reflux.inference_gateway.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.engine import metrics
from reflux_inference_gateway.engine.core import CoreOptions, EngineCore, Event, Weights
from reflux_inference_gateway.engine.http import EngineDoor
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.registration import GatewayLink
from reflux_inference_gateway.engine.servicer import SERVICE_NAME, EngineServicer
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_inference_gateway.engine.types import ModelLimits
from reflux_inference_gateway.engine.weights import following
from reflux_kit.errors import StartupError
from reflux_kit.server import Bound, Mount, Service, serve
from reflux_model.config import ModelConfig
from reflux_model.errors import ModelFolderError, ParameterMismatchError, UnsupportedModelError
from reflux_model.folder import load_folder

log = logging.getLogger(__name__)

_GIL_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class LoadedModel:
    """What the model folder holds."""

    folder: Path
    config: ModelConfig
    weights: Weights
    tokenizer: TextTokenizer
    eos_ids: tuple[int, ...]


def load_model(settings: EngineSettings) -> LoadedModel:
    """Reads the model folder; raises StartupError that names what is missing."""
    if settings.model is None:
        raise StartupError("REFLUX_ENGINE_MODEL must name a model folder")
    try:
        config, params = load_folder(settings.model, dtype=getattr(torch, settings.dtype))
        tokenizer = TextTokenizer(settings.model)
    except (ModelFolderError, UnsupportedModelError, ParameterMismatchError, OSError, ValueError) as error:
        raise StartupError(f"REFLUX_ENGINE_MODEL: {error}") from None
    eos_ids = tokenizer.eos_ids() | ({config.eos_token_id} if config.eos_token_id is not None else set())
    return LoadedModel(settings.model, config, Weights(params, version=0, epoch=0), tokenizer, tuple(sorted(eos_ids)))


def core_options(settings: EngineSettings, config: ModelConfig) -> CoreOptions:
    """Rows and length that fit the KV budget; raises StartupError when not even one sequence does."""
    length = min(settings.max_model_len or config.max_positions, config.max_positions)
    element_bytes = getattr(torch, settings.dtype).itemsize
    row_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_size * element_bytes * length
    rows = min(settings.max_rows, settings.kv_budget_bytes // row_bytes)
    if rows < 1:
        raise StartupError(
            f"REFLUX_ENGINE_KV_BUDGET_BYTES={settings.kv_budget_bytes} does not hold one sequence of {length} tokens "
            f"({row_bytes} bytes); raise it or set REFLUX_ENGINE_MAX_MODEL_LEN"
        )
    return CoreOptions(
        max_rows=rows,
        max_model_len=length,
        prefill_tokens_per_step=settings.prefill_tokens_per_step,
        kv_after_swap=settings.kv_after_swap,
    )


class Fatal:
    """Owns the reason for which the process must end with status 1; its supervisor starts another one."""

    def __init__(self) -> None:
        self.reason = ""

    def __call__(self, reason: str) -> None:
        """Ends the process in order: open requests get an error, the gateway a deregistration."""
        log.error("ends: %s", reason)
        self.reason = reason
        signal.raise_signal(signal.SIGTERM)


class Description:
    """Owns what the replica says about itself; complete once the addresses are bound."""

    def __init__(self, settings: EngineSettings, model_id: str, options: CoreOptions, engine: EngineLoop) -> None:
        owner = settings.run or "engine"
        self._fixed = ReplicaMessage(
            name=f"replicas/{owner[:80]}-{settings.rank}-{uuid.uuid4().hex[:8]}",
            model_id=model_id,
            role=ReplicaMessage.ROLE_BOTH,
            capacity=options.max_rows,
            node=settings.node,
            run=settings.run,
        )
        self._engine = engine

    @property
    def name(self) -> str:
        """Resource name of this process."""
        return self._fixed.name

    def bind(self, bound: Bound) -> None:
        """Fills in the addresses."""
        self._fixed.grpc_address = bound.grpc
        self._fixed.http_url = f"http://{bound.http}" if bound.http else ""

    def __call__(self) -> ReplicaMessage:
        """The replica at this moment."""
        load = self._engine.load()
        message = ReplicaMessage()
        message.CopyFrom(self._fixed)
        message.version, message.epoch = load.version, load.epoch
        message.sequences, message.pending_tokens = load.running + load.waiting, load.pending_tokens
        return message


@asynccontextmanager
async def build(settings: EngineSettings) -> AsyncIterator[Service]:
    """Owns the model, the engine's thread, and the links to gateway and broker."""
    torch.set_num_threads(settings.threads)
    model = load_model(settings)
    options = core_options(settings, model.config)
    model_id = settings.model_id or settings.run or model.folder.resolve().name

    def new_core(deliver: Callable[[str, Event], None]) -> EngineCore:
        decode = model.tokenizer.decode
        return EngineCore(model.config, model.weights, options, deliver, eos_ids=model.eos_ids, decode=decode)

    fatal = Fatal()
    open_samples = options.max_rows + settings.max_waiting_samples
    engine = EngineLoop(new_core, max_open_samples=open_samples, on_failure=fatal)
    limits = ModelLimits(vocab_size=model.config.vocab_size, max_model_len=options.max_model_len)
    describe = Description(settings, model_id, options, engine)
    link = GatewayLink(settings, describe)
    metrics.observe(engine)
    door = EngineDoor(engine, model.tokenizer, limits, model_id, settings.stack_secret, settings.max_body_bytes)
    mount = Mount(EngineServicer(engine, limits, describe), add_EngineServiceServicer_to_server, SERVICE_NAME)

    def attend(bound: Bound) -> AbstractAsyncContextManager[None]:
        describe.bind(bound)
        return _attended(settings, model_id, describe.name, engine, model.weights, link, fatal)

    # The model stays for the life of the process; scanning it again and again costs tens of milliseconds.
    gc.collect()
    gc.freeze()
    async with engine:
        yield Service((mount,), door.application(), attend)
    if fatal.reason:
        raise SystemExit(1)


@asynccontextmanager
async def _attended(
    settings: EngineSettings,
    model_id: str,
    replica: str,
    engine: EngineLoop,
    weights: Weights,
    link: GatewayLink,
    fatal: Fatal,
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        if settings.weights == "broker":
            follower = following(settings, model_id, replica, engine, weights, link.announce, fatal)
            await stack.enter_async_context(follower)
        await stack.enter_async_context(link.running())
        yield


def main() -> None:
    """Runs the engine until SIGTERM."""
    # Engine thread and event loop share the interpreter; the default of 5 ms would make each wait that long.
    sys.setswitchinterval(_GIL_SWITCH_SECONDS)
    serve("engine", EngineSettings, build)


if __name__ == "__main__":
    main()
