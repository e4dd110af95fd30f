"""Prometheus metrics of the trainer."""

from prometheus_client import Counter, Gauge, Histogram

STEP = Gauge("reflux_trainer_step", "Training steps done", ["run"])
REWARD = Gauge("reflux_trainer_reward_mean", "Mean reward of the last step's samples", ["run"])
STEP_SECONDS = Histogram(
    "reflux_trainer_step_seconds",
    "Wall-clock seconds per step",
    ["run"],
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15, 60),
)
LAG = Histogram(
    "reflux_trainer_lag_versions", "Age of trained samples in versions", ["run"], buckets=(0, 1, 2, 4, 8, 16, 32)
)
RUNS_ACTIVE = Gauge("reflux_trainer_runs_active", "Runs that this trainer carries, by tenant", ["tenant"])
RUNS_ENDED = Counter("reflux_trainer_runs_ended", "Runs that ended, by state", ["state"])
