"""Gauges of the probe."""

from prometheus_client import Gauge

SELF_TEST = Gauge(
    "reflux_transfer_self_test_bytes_per_second", "Rate of the start-up self-test, 0 if it failed", ["backend"]
)
CHOSEN = Gauge("reflux_transfer_chosen", "1 for the backend that the start-up probe chose", ["backend"])
PATH = Gauge(
    "reflux_transfer_path_bytes_per_second", "Rate of the last test of a pair of processes", ["peer", "backend"]
)
PATH_OK = Gauge("reflux_transfer_path_ok", "0 when the last test of a pair was below its floor", ["peer", "backend"])
