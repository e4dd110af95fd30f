"""Start-up probe and path tests: what works here, how fast it is, what is chosen and why."""

from reflux_transfer.probe.choice import Choice, probe
from reflux_transfer.probe.paths import PathBook, PathStatus, measure_pair
from reflux_transfer.probe.self_test import BackendStatus, measure

__all__ = ["BackendStatus", "Choice", "PathBook", "PathStatus", "measure", "measure_pair", "probe"]
