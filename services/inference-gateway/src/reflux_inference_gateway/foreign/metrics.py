"""What an adapter counts."""

from prometheus_client import Gauge, Histogram

PAUSE = Histogram(
    "reflux_engine_adapter_pause_seconds",
    "From pause to resume of the engine, per commit",
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60),
)
SERVED = Gauge("reflux_engine_adapter_version", "Weight version that the engine serves; 0 before the first commit")
