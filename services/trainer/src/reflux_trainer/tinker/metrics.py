"""Prometheus metrics of the Tinker API."""

from prometheus_client import Counter, Gauge, Histogram

OPEN = Gauge("reflux_tinker_open_futures", "Futures that are logged and not done")
DONE = Counter("reflux_tinker_futures_done", "Futures that ended: done, user (at fault) or server", ["outcome"])
OPERATION_SECONDS = Histogram(
    "reflux_tinker_operation_seconds",
    "From the turn of a model's operation to its result, by kind",
    ["kind"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
GROUP_SAMPLES = Histogram(
    "reflux_tinker_group_samples", "Samples that were drawn together", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 1024)
)
PUBLISHES = Counter("reflux_tinker_sampler_publishes", "Weights that were put on a replica for a sampler")
KINDS = {
    "C": "create_model",
    "F": "forward_backward",
    "G": "forward",
    "O": "optim_step",
    "S": "save_weights",
    "P": "save_weights_for_sampler",
    "L": "load_weights",
}
"""Kinds of operations by the character that the log keeps."""
