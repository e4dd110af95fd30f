"""Prometheus metrics of a learner process."""

from prometheus_client import Counter, Gauge, Histogram

OPERATION_SECONDS = Histogram(
    "reflux_learner_operation_seconds",
    "Time of one operation in the torch thread",
    ["operation"],
    buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 60),
)
TOKENS = Counter("reflux_learner_tokens_total", "Tokens that counted in a loss")
REFUSED_STEPS = Counter("reflux_learner_refused_steps_total", "Steps refused because loss or gradient was not finite")
VERSION = Gauge("reflux_learner_version", "Optimizer steps since the model was created")
LOGPROB_GAP = Gauge("reflux_learner_max_logprob_gap", "Largest |sampler - learner| log-prob of the last batch")
CLIP_FRACTION = Gauge("reflux_learner_clip_fraction", "Share of clipped tokens of the last batch")
ENTROPY = Gauge("reflux_learner_entropy_nats", "Mean entropy of the last batch")
PUBLISH_SECONDS = Histogram("reflux_learner_publish_seconds", "Time of a weight version, staging to commit")
SAVE_PAUSE_SECONDS = Histogram("reflux_learner_save_pause_seconds", "Time that training stood still for a checkpoint")
