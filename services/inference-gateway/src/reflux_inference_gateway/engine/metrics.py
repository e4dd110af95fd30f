"""The engine's Prometheus metrics; names start with reflux_engine_."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.refresh import SwapFigures

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

RUNNING = Gauge("reflux_engine_running_sequences", "Sequences in the decode batch")
WAITING = Gauge("reflux_engine_waiting_sequences", "Sequences without a row")
PENDING_TOKENS = Gauge("reflux_engine_pending_tokens", "Tokens that running and waiting sequences may still cost")
VERSION = Gauge("reflux_engine_weight_version", "Weight version of new sequences")
GENERATED_TOKENS = Gauge("reflux_engine_generated_tokens_total", "Tokens drawn since the start")
PREFILLED_PROMPTS = Gauge("reflux_engine_prefilled_prompts_total", "Prompts computed since the start")
PREFILLED_TOKENS = Gauge("reflux_engine_prefilled_tokens_total", "Prompt tokens computed since the start")
REUSED_TOKENS = Gauge("reflux_engine_reused_tokens_total", "Prompt tokens that other prompts had computed")
HANDOVERS = Counter(
    "reflux_engine_handovers",
    "Prompts computed for another engine (offered, refused, released, expired) or by one (pulled, failed)",
    ["outcome"],
)
OFFERED_BYTES = Gauge("reflux_engine_offered_bytes", "Memory of computed prompts that other engines may read")
SWAP_PAUSE = Histogram(
    "reflux_engine_swap_pause_seconds", "Longest gap between two decode steps around a swap", buckets=_SECONDS
)
REFRESH = Histogram(
    "reflux_engine_refresh_seconds", "From a swap until every running sequence decodes under it", buckets=_SECONDS
)
REFRESHED_TOKENS = Histogram(
    "reflux_engine_refreshed_tokens",
    "Tokens whose keys and values were computed again after a swap",
    buckets=(0, 100, 1000, 10_000, 100_000, 1_000_000),
)


def swapped(figures: SwapFigures) -> None:
    """Counts a swap; called in the engine's thread."""
    SWAP_PAUSE.observe(figures.pause_seconds)
    REFRESH.observe(figures.refresh_seconds)
    REFRESHED_TOKENS.observe(figures.refreshed_tokens)


def observe(engine: EngineLoop, offered_bytes: Callable[[], int]) -> None:
    """Binds the gauges to the engine's snapshot; the last engine of a process wins."""
    OFFERED_BYTES.set_function(offered_bytes)
    RUNNING.set_function(lambda: engine.load().running)
    WAITING.set_function(lambda: engine.load().waiting)
    PENDING_TOKENS.set_function(lambda: engine.load().pending_tokens)
    VERSION.set_function(lambda: engine.load().version)
    GENERATED_TOKENS.set_function(lambda: engine.load().generated_tokens)
    PREFILLED_PROMPTS.set_function(lambda: engine.load().prefilled_prompts)
    PREFILLED_TOKENS.set_function(lambda: engine.load().prefilled_tokens)
    REUSED_TOKENS.set_function(lambda: engine.load().reused_tokens)
