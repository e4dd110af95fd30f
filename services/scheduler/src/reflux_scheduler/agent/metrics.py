"""The agent's Prometheus metrics."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import Gauge

from reflux_scheduler.agent.orders import RoleReport, State

_MEMBERS = Gauge("reflux_agent_members", "Members by state.", ["state"])
_MEMORY = Gauge("reflux_agent_memory_bytes", "Resident memory of all process trees, by role.", ["role"])
_RESTARTS = Gauge("reflux_agent_restarts", "Restarts of the members that this agent lists, by role.", ["role"])


def observe(reports: Iterable[RoleReport]) -> None:
    """Sets the gauges from the latest reports."""
    memory: dict[str, int] = {}
    restarts: dict[str, int] = {}
    states = dict.fromkeys(get_args(State), 0)
    for report in reports:
        role = report.role_id.split("/")[-2]
        states[report.state] += 1
        memory[role] = memory.get(role, 0) + report.rss_bytes
        restarts[role] = restarts.get(role, 0) + report.restarts
    for state, count in states.items():
        _MEMBERS.labels(state).set(count)
    # Roles that have left would otherwise keep their last figures.
    _MEMORY.clear()
    _RESTARTS.clear()
    for role in memory:
        _MEMORY.labels(role).set(memory[role])
        _RESTARTS.labels(role).set(restarts[role])
