"""What a replica can tell about the weights that it serves: their fingerprint, recomputed from memory."""

import asyncio

import torch
import xxhash

from reflux_inference_gateway.engine.holding import layout_of
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_kit.errors import NotFound, Unavailable
from reflux_model.parameters import Parameters
from reflux_transfer import fingerprint
from reflux_transfer.layout import SLICE_BYTES

_ATTEMPTS = 3


def fingerprint_of(params: Parameters) -> int:
    """That of `reflux_transfer.fingerprint.of`, from the tensors themselves."""
    layout = layout_of(params)
    memory = {name: tensor.flatten().view(torch.uint8).numpy().data for name, tensor in params.items()}
    return fingerprint.tree(
        xxhash.xxh3_64_intdigest(memory[piece.slot.name][piece.start : piece.start + piece.length])
        for piece in layout.pieces(SLICE_BYTES)
    )


async def live_fingerprint(engine: EngineLoop, adapter: str = "") -> tuple[int, int]:
    """Epoch and fingerprint of what is served; decoding goes on meanwhile, so that a swap makes it begin anew.

    Raises `Unavailable` while the weights are a mixture, or when they change all the time, and `NotFound` for an
    adapter that was never committed.
    """
    for _ in range(_ATTEMPTS):
        writes, weights = engine.writes, engine.serves(adapter)
        if weights is None:
            raise NotFound(f"no version of adapter {adapter!r} is here", adapter=adapter)
        found = await asyncio.to_thread(fingerprint_of, weights.params)
        if engine.unfit is not None:
            raise Unavailable(engine.unfit)
        if engine.writes == writes and writes % 2 == 0:
            return weights.epoch, found
    raise Unavailable("the weights changed while their fingerprint was computed")
