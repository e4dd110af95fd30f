"""Where the replica's weights lie: in arenas that the transfer library writes, in one or two copies."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from reflux_inference_gateway.engine.prefix_store import BLOCK_TOKENS, block_bytes
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_kit.errors import StartupError
from reflux_model.config import ModelConfig
from reflux_model.lora import LoraSpec, factor_shapes
from reflux_model.parameters import Parameters
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.errors import BackendUnavailable
from reflux_transfer.layout import Layout
from reflux_transfer.modes import Budget, ModeChoice, NotEnoughMemory, choose_mode
from reflux_transfer.probe.choice import Choice

log = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Holding:
    """Arenas whose live buffer holds what is served."""

    layout: Layout
    arenas: ReplicaArenas
    mode: ModeChoice
    adapter: LoraSpec | None = None
    """Of an adapter: what lies there are factors."""

    def adopt(self, params: Parameters) -> Weights:
        """Copies what the model folder holds into the live buffer, so that the folder's copy can be dropped."""
        own = self.weights(self.arenas.live_index, version=0, epoch=0)
        for name, place in own.params.items():
            place.copy_(params[name])
        return own

    def weights(self, index: int, version: int, epoch: int) -> Weights:
        """What lies in a buffer, without a copy."""
        return Weights(views(self.layout, self.arenas.view(index)), version, epoch, self.adapter)


def layout_of(params: Mapping[str, torch.Tensor]) -> Layout:
    """The layout that the replica registers: names, shapes and dtypes in the parameters' order."""
    return Layout.from_shapes(
        {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in params.items()}
    )


def views(layout: Layout, buffer: memoryview) -> Parameters:
    """Tensors that lie in an arena's buffer, without a copy; valid as long as nobody pulls into it."""
    params = {}
    for slot in layout.slots:
        flat = torch.frombuffer(buffer[slot.offset : slot.end], dtype=getattr(torch, slot.dtype))
        params[slot.name] = flat.view(slot.shape)
    return params


@contextmanager
def holding(
    settings: EngineSettings, choice: Choice, config: ModelConfig, layout: Layout, options: CoreOptions
) -> Iterator[Holding]:
    """Allocates the arenas. Raises `StartupError` where the transport does not work or the set budget is too small."""
    mode = _mode(settings, config, layout, options)
    log.info("weights are updated by %s: %s", mode.mode, mode.sentence)
    with _opened(settings, choice, layout, mode) as held:
        yield held


@contextmanager
def holding_adapter(settings: EngineSettings, choice: Choice, config: ModelConfig, spec: LoraSpec) -> Iterator[Holding]:
    """Arenas of one adapter's factors; they are small, so that there are always two buffers.

    Raises `UnsupportedModelError` for a target that the model lacks.
    """
    shapes = {name: (shape, settings.dtype) for name, shape in factor_shapes(config, spec).items()}
    mode = ModeChoice("swap", "an adapter")
    with _opened(settings, choice, Layout.from_shapes(shapes), mode, spec) as held:
        yield held


@contextmanager
def _opened(
    settings: EngineSettings, choice: Choice, layout: Layout, mode: ModeChoice, adapter: LoraSpec | None = None
) -> Iterator[Holding]:
    try:
        backend = choice.open(settings.transport)
    except BackendUnavailable as error:
        raise StartupError(f"REFLUX_TRANSPORT={settings.transport}: {error}") from None
    with closing(backend), closing(ReplicaArenas(layout, buffers=mode.buffers, backend=backend)) as arenas:
        yield Holding(layout, arenas, mode, adapter)


def _mode(settings: EngineSettings, config: ModelConfig, layout: Layout, options: CoreOptions) -> ModeChoice:
    weights, kv = layout.region_bytes, kv_bytes(config, options, settings.dtype)
    free = settings.memory_budget_bytes or _available_bytes() + weights  # the folder's copy goes away
    try:
        return choose_mode(Budget(weights, free, kv), settings.weight_mode)
    except NotEnoughMemory as error:
        if settings.memory_budget_bytes:
            raise StartupError(f"REFLUX_ENGINE_MEMORY_BUDGET_BYTES does not hold the weights: {error}") from None
        # What the kernel calls available is an estimate, and pages of the cache are taken as they are used.
        log.warning("memory is short: %s", error)
        wanted = "in_place" if settings.weight_mode == "auto" else settings.weight_mode
        return ModeChoice(wanted, str(error))


def kv_bytes(config: ModelConfig, options: CoreOptions, dtype: str) -> int:
    """Memory of the KV cache and of the prompts that are kept."""
    block = block_bytes(config, getattr(torch, dtype).itemsize)
    return block * (options.kv_tokens // BLOCK_TOKENS + options.prefix_blocks)


def _available_bytes() -> int:
    """MemAvailable of the host (proc(5)); 0 where the file lacks it."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
