"""The weight-transfer engine inside a vLLM worker: pulled bytes become parameters, layer by layer.

Written against vLLM 0.32. Layers are reloaded through vLLM's own mechanism because on CPU the matrices are repacked and
their originals gone: `model.load_weights` alone would leave a half-updated model.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from reflux_transfer.layout import Layout
from reflux_vllm_plugin.pulling import Puller
from reflux_weightplan.wire import parse

log = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the adapter sends once: the tensors of every later version, as `reflux_weightplan.wire.canonical` text."""

    layout: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which pulled epoch is to be loaded."""

    epoch: int = 0


class RefluxWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Pulls in PREPARE, while requests run; loads from its own memory in COMMIT, while they are paused."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    puller: Puller | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Reserves the buffer; a second adapter takes over from the first."""
        layout = parse(init_info.layout.encode())
        if self.puller and self.puller.layout == layout:
            self.puller.cancel()
            return
        self.shutdown()
        self.puller = Puller(layout)

    def prepare(self, offer: str) -> None:
        """Begins to pull an offer. Raises `RuntimeError` before `init_transfer_engine`."""
        self._opened().start(offer)

    def cancel(self) -> None:
        """Ends a pull."""
        self._opened().cancel()

    def status(self) -> dict[str, Any]:
        """See `Puller.status`."""
        return self._opened().status()

    def start_weight_update(self) -> None:
        """Puts empty tensors in place of the layers' own."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, without its wait for an accelerator: the loading below is done when it returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads every tensor of the pulled epoch; the buffer is free for the next pull afterwards."""
        start = time.perf_counter()
        puller = self._opened()
        with contextlib.ExitStack() as undo:
            # What a failed load has buffered would go into the next one: it is worked off, the engine stays paused.
            undo.callback(finalize_layerwise_reload, self.model, self.model_config)
            self.model.load_weights(views(puller.intake.layout, puller.taken(update_info.epoch)))
            undo.pop_all()
        log.info("loaded epoch %d in %.3f s", update_info.epoch, time.perf_counter() - start)

    def finish_weight_update(self) -> None:
        """Repacks what was loaded into the layers' own tensors."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Frees the buffer."""
        if self.puller:
            self.puller.close()
            self.puller = None

    def _opened(self) -> Puller:
        if self.puller is None:
            raise RuntimeError("init_weight_transfer_engine was not called")
        return self.puller


def views(layout: Layout, buffer: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that lie in the buffer, without a copy, in layout order."""
    for slot in layout.slots:
        flat = torch.frombuffer(buffer[slot.offset : slot.end], dtype=getattr(torch, slot.dtype))
        yield slot.name, flat.view(slot.shape)
