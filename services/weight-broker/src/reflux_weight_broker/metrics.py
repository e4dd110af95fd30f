"""Figures of the broker under /metrics."""

from prometheus_client import Counter, Gauge, Histogram

from reflux_weight_broker.records import Phase, Transaction

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

VERSIONS = Counter("reflux_weight_broker_versions_total", "Versions that ended", ["outcome"])
SYNC = Histogram(
    "reflux_weight_broker_sync_seconds", "Seconds of committed versions by phase", ["phase"], buckets=_SECONDS
)
BYTES = Counter("reflux_weight_broker_bytes_total", "Bytes that replicas pulled for versions that ended")
PAUSE = Histogram(
    "reflux_weight_broker_pause_seconds",
    "Seconds that decoding stood still per swap",
    buckets=(0.0005, 0.002, *_SECONDS),
)
PROBES = Counter("reflux_weight_broker_probes_total", "Probe prompts compared with the learner's", ["outcome"])
MESSAGES = Counter("reflux_weight_broker_control_messages_total", "Calls and events of versions that ended")
REPLICAS = Gauge("reflux_weight_broker_replicas", "Registered replicas")


def observe(transaction: Transaction) -> None:
    """Counts a version that has ended."""
    committed = transaction.phase is Phase.COMMITTED
    VERSIONS.labels("committed" if committed else "aborted").inc()
    BYTES.inc(transaction.bytes)
    MESSAGES.inc(transaction.control_messages)
    if committed:
        seats = [seat for member in transaction.members.values() for seat in member.seats.values()]
        SYNC.labels("prepare").observe(transaction.prepare_seconds)
        SYNC.labels("transfer").observe(max((seat.transfer_seconds for seat in seats), default=0.0))
        SYNC.labels("commit").observe(transaction.commit_seconds)
        for seat in seats:
            PAUSE.observe(seat.pause_ms / 1e3)
