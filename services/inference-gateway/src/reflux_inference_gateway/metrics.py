"""The gateway's Prometheus metrics; names start with reflux_gateway_."""

from collections.abc import Sequence
from functools import lru_cache

from prometheus_client import Counter, Gauge

from reflux.common.v1.common_pb2 import Sample
from reflux_inference_gateway.fleet import Fleet
from reflux_inference_gateway.policy.breaker import Position
from reflux_inference_gateway.replicas import ReplicaTable, State
from reflux_inference_gateway.verdicts import Verdicts

_OPEN = {Position.CLOSED: 0.0, Position.HALF_OPEN: 0.5, Position.OPEN: 1.0}

SAMPLES = Counter("reflux_gateway_samples", "Finished samples by finish reason", ["model", "finish_reason"])
TOKENS = Counter("reflux_gateway_generated_tokens", "Generated tokens that went through GenerateGroup", ["model"])
REQUESTS = Counter("reflux_gateway_requests", "Requests that left, by outcome", ["outcome"])
HTTP_RESPONSES = Counter("reflux_gateway_http_responses", "HTTP answers by route and status", ["route", "status"])
HELD = Gauge("reflux_gateway_held_requests", "Requests that wait: fleet paused, or no replica fits")
RUNNING = Gauge("reflux_gateway_running_requests", "Requests that a replica works on")
REISSUED = Counter("reflux_gateway_reissued", "Requests that lost their replica and went to another one")
PREFILL_LEGS = Counter(
    "reflux_gateway_prefill_legs",
    "Groups while there are prefill replicas: computed there (remote), or by the decoding replica and why",
    ["outcome"],
)
PULLS = Counter("reflux_gateway_pulls", "Handed-over prompts that were read (used), or not (failed)", ["outcome"])
REPLICA_TOKENS = Gauge("reflux_gateway_replica_inflight_tokens", "Tokens dispatched and not answered", ["replica"])
REPLICA_VERSION = Gauge("reflux_gateway_replica_version", "Weight version of a replica", ["replica"])
BREAKER_OPEN = Gauge(
    "reflux_gateway_breaker_open",
    "1 while a replica is spared after failures, 0.5 while it is tried again",
    ["replica"],
)
ARM_WEIGHT = Gauge("reflux_gateway_arm_weight", "Weight of an arm of the division of traffic", ["model", "arm"])
REPLICA_READY = Gauge("reflux_gateway_replica_ready", "1 when a replica takes requests", ["replica"])


def count_samples(model_id: str, samples: Sequence[Sample]) -> None:
    """Counts finished samples and their tokens."""
    _tokens(model_id).inc(sum(len(sample.token_ids) for sample in samples))
    for sample in samples:
        _samples(model_id, sample.finish_reason).inc()


@lru_cache(maxsize=1024)
def _tokens(model_id: str) -> Counter:
    return TOKENS.labels(model_id)


@lru_cache(maxsize=1024)
def _samples(model_id: str, finish_reason: str) -> Counter:
    return SAMPLES.labels(model_id, finish_reason)


def observe_fleet(fleet: Fleet) -> None:
    """Binds the gauges of waiting and running requests to the fleet's ledger."""
    HELD.set_function(lambda: fleet.ledger.held)
    RUNNING.set_function(lambda: fleet.ledger.running)


def observe_replicas(table: ReplicaTable) -> None:
    """Writes each replica's gauges and drops those of forgotten ones."""
    for gauge in (REPLICA_TOKENS, REPLICA_VERSION, REPLICA_READY):
        gauge.clear()
    for entry in table.entries():
        name = entry.info.name
        REPLICA_TOKENS.labels(name).set(entry.inflight_tokens)
        REPLICA_VERSION.labels(name).set(entry.info.version)
        REPLICA_READY.labels(name).set(entry.state is State.READY)


def observe_verdicts(verdicts: Verdicts, now_seconds: float) -> None:
    """Writes the gauges of breakers that saw a failure, and of arms."""
    BREAKER_OPEN.clear()
    for name, position in verdicts.positions(now_seconds).items():
        BREAKER_OPEN.labels(name).set(_OPEN[position])
    ARM_WEIGHT.clear()
    for model_id, division in verdicts.divisions.items():
        for arm, weight in division.traffic.weights.items():
            ARM_WEIGHT.labels(model_id, arm).set(weight)
