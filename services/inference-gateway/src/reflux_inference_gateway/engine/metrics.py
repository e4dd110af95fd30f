"""The engine's Prometheus metrics; names start with reflux_engine_."""

from prometheus_client import Gauge

from reflux_inference_gateway.engine.loop import EngineLoop

RUNNING = Gauge("reflux_engine_running_sequences", "Sequences in the decode batch")
WAITING = Gauge("reflux_engine_waiting_sequences", "Sequences without a row")
PENDING_TOKENS = Gauge("reflux_engine_pending_tokens", "Tokens that running and waiting sequences may still cost")
VERSION = Gauge("reflux_engine_weight_version", "Weight version of new sequences")
GENERATED_TOKENS = Gauge("reflux_engine_generated_tokens_total", "Tokens drawn since the start")
PREFILLED_PROMPTS = Gauge("reflux_engine_prefilled_prompts_total", "Prompts computed since the start")


def observe(engine: EngineLoop) -> None:
    """Binds the gauges to the engine's snapshot; the last engine of a process wins."""
    RUNNING.set_function(lambda: engine.load().running)
    WAITING.set_function(lambda: engine.load().waiting)
    PENDING_TOKENS.set_function(lambda: engine.load().pending_tokens)
    VERSION.set_function(lambda: engine.load().version)
    GENERATED_TOKENS.set_function(lambda: engine.load().generated_tokens)
    PREFILLED_PROMPTS.set_function(lambda: engine.load().prefilled_prompts)
