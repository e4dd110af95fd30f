"""Follows the weight broker: pulls new versions into the idle arena and swaps between decode steps."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from reflux_inference_gateway.engine.core import Weights
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.settings import EngineSettings


@asynccontextmanager
async def following(
    settings: EngineSettings,
    model_id: str,
    replica: str,
    engine: EngineLoop,
    weights: Weights,
    announce: Callable[[], None],
) -> AsyncIterator[None]:
    """Keeps the engine at the broker's committed version while the block runs."""
    yield
