"""The scheduler's Prometheus metrics."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from reflux_scheduler.fleet import Fleet
from reflux_scheduler.inventory import Inventory
from reflux_scheduler.job import Job, State

_JOBS = Gauge("reflux_scheduler_jobs", "Jobs by state.", ["state"])
_NODES = Gauge("reflux_scheduler_nodes", "Nodes by what they can take.", ["state"])
_RESOURCES = Gauge("reflux_scheduler_resources", "Resources of the topology.", ["resource", "share"])
_WAIT = Histogram(
    "reflux_scheduler_wait_seconds", "Time from creation to placement.", buckets=(0.1, 1, 10, 60, 600, 3600, 36000)
)
_SPAN = Counter(
    "reflux_scheduler_gangs_placed_total", "Gangs placed, by the tightest domain that holds them.", ["level"]
)
_RESTARTS = Counter("reflux_scheduler_member_restarts_total", "Restarts of members.", ["role"])
_ENDED = Counter("reflux_scheduler_jobs_ended_total", "Jobs that ended, by final state.", ["state"])


class Metrics:
    """What the controller counts."""

    def placed(self, job: Job) -> None:
        """A job got its resources."""
        if job.placement is not None:
            _WAIT.observe(max(0.0, job.placed_at - job.created_at))
            _SPAN.labels(job.placement.level).inc()

    def changed(self, before: Job, after: Job) -> None:
        """A job changed."""
        for old, new in zip(before.members, after.members, strict=False):
            if new.restarts > old.restarts:
                _RESTARTS.labels(new.role).inc(new.restarts - old.restarts)
        if after.final and not before.final:
            _ENDED.labels(after.state).inc()

    def observe(self, jobs: Iterable[Job], inventory: Inventory, fleet: Fleet, now: float) -> None:
        """Sets the gauges; once a round."""
        states = [job.state for job in jobs]
        for state in get_args(State):
            _JOBS.labels(state).set(states.count(state))
        nodes = inventory.topology.nodes
        live = len(fleet.available(now))
        _NODES.labels("available").set(live)
        _NODES.labels("absent").set(len(nodes) - live)
        for resource, unit in (("gpus", 1), ("millicpus", 1000), ("memory_bytes", 1)):
            name = "cpus" if resource == "millicpus" else resource
            total = sum(getattr(node.resources, resource) for node in nodes)
            free = sum(getattr(inventory.unallocated(node.name), resource) for node in nodes)
            _RESOURCES.labels(name, "total").set(total / unit)
            _RESOURCES.labels(name, "free").set(free / unit)
