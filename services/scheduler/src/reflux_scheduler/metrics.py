"""The scheduler's Prometheus metrics; docs/metrics.md says what each means."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from prometheus_client import Counter, Gauge, Histogram

from reflux_placement.policy.view import Wait
from reflux_scheduler.job import Job, Placement, State
from reflux_scheduler.ledger import planned_placement

if TYPE_CHECKING:
    from reflux_scheduler.controller import Controller

_SECONDS = (0.01, 0.1, 1, 10, 60, 600, 3600, 36000)
_JOBS = Gauge("reflux_scheduler_jobs", "Jobs by state.", ["state"])
_NODES = Gauge("reflux_scheduler_nodes", "Nodes by what they can take.", ["state"])
_RESOURCES = Gauge("reflux_scheduler_resources", "Resources of the topology.", ["resource", "share"])
_UTILISATION = Gauge("reflux_scheduler_utilisation", "Share of the GPUs of nodes that are up that jobs hold.")
_FRAGMENTATION = Gauge(
    "reflux_scheduler_fragmentation",
    "Share of the free GPUs that lie in domains that are partly used: nodes, and the tightest level above them.",
    ["level"],
)
_WAITING = Gauge("reflux_scheduler_waiting_jobs", "Jobs that wait, by cause.", ["cause"])
_GRANTS = Gauge("reflux_scheduler_grants", "Grants of the cluster by state.", ["state"])
_WAIT = Histogram("reflux_scheduler_wait_seconds", "Time from queueing to placement.", buckets=_SECONDS)
_WAIT_BY_CAUSE = Histogram(
    "reflux_scheduler_wait_by_cause_seconds",
    "Time that a placed job had waited for each cause; one observation per job and cause.",
    ["cause"],
    buckets=_SECONDS,
)
_START = Histogram("reflux_scheduler_start_seconds", "Time from placement until all members run.", buckets=_SECONDS)
_DECIDE = Histogram(
    "reflux_scheduler_cycle_seconds",
    "Time that the policy thinks in one cycle.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1, 5),
)
_FREE_TO_START = Histogram(
    "reflux_scheduler_free_to_start_seconds",
    "Time from the moment at which room was freed (or the job came, when that was later) until the gang runs.",
    buckets=_SECONDS,
)
_SPAN = Counter(
    "reflux_scheduler_gangs_placed_total", "Gangs placed, by the tightest domain that holds them.", ["level"]
)
_CROSS_RACK = Counter("reflux_scheduler_cross_rack_gangs_total", "Gangs placed that span more than one rack.")
_BACKFILLED = Counter("reflux_scheduler_backfilled_total", "Gangs started in front of a reservation.")
_PREEMPTED = Counter("reflux_scheduler_preempted_jobs_total", "Jobs stopped for others.")
_LOST_WORK = Counter(
    "reflux_scheduler_preempted_work_lost_seconds_total", "GPU-seconds since the last checkpoints of preempted jobs."
)
_REQUEUED = Counter("reflux_scheduler_requeued_jobs_total", "Jobs sent back to the queue, by event.", ["kind"])
_RESTARTS = Counter("reflux_scheduler_member_restarts_total", "Restarts of members.", ["role"])
_ENDED = Counter("reflux_scheduler_jobs_ended_total", "Jobs that ended, by final state.", ["state"])
_LEADING = Gauge("reflux_scheduler_leading", "1 while this scheduler leads.")
_CAUSES = ("resources", "fragmentation", "quota", "reservation", "behind", "nodes_away")


class Metrics:
    """What one scheduler counts. `levels` are the topology's, tightest first; the one above the nodes is the rack."""

    def __init__(self, levels: Sequence[str]) -> None:
        self._levels = tuple(levels)
        self._freed_at = 0.0
        self._ready_at: dict[str, float] = {}
        """By job that was placed and does not run yet: when room was last given back before, or when it came."""

        self._waits: dict[str, tuple[str, float]] = {}
        """By job: what it waits for now, and since when."""

        self._waited: dict[str, dict[str, float]] = {}
        """By job: seconds that it waited for other causes before."""

    def leading(self, leads: bool) -> None:
        """Whether this scheduler leads now. One that does not shows nothing that would be added to the leader's."""
        _LEADING.set(leads)
        if not leads:
            for gauge in (_JOBS, _NODES, _RESOURCES, _FRAGMENTATION, _WAITING, _GRANTS):
                gauge.clear()
            _UTILISATION.set(0)
            self._ready_at.clear()
            self._waits.clear()
            self._waited.clear()

    def decided(self, seconds: float) -> None:
        """A cycle of the policy."""
        _DECIDE.observe(seconds)

    def placed(self, job: Job, *, backfilled: bool) -> None:
        """A job got its room."""
        if job.placement is not None:
            _WAIT.observe(max(0.0, job.placed_at - (job.queued_at or job.created_at)))
            _SPAN.labels(job.placement.level).inc()
            _CROSS_RACK.inc(job.placement.level not in self._levels[:2])
            _BACKFILLED.inc(backfilled)
            self._pass(job.name, "", job.placed_at)
            self._waits.pop(job.name, None)
            for cause, seconds in self._waited.pop(job.name, {}).items():
                _WAIT_BY_CAUSE.labels(cause).observe(seconds)

    def waiting(self, waits: Mapping[str, Wait], now: float) -> None:
        """What jobs wait for since the present cycle; jobs that are not named wait for nothing any more."""
        for job in self._waits.keys() - waits.keys():
            del self._waits[job]
            self._waited.pop(job, None)
        for job, wait in waits.items():
            self._pass(job, wait.cause, now)

    def room_came(self, now: float) -> None:
        """Nodes take new work that took none before."""
        self._freed_at = now

    def preempted(self, jobs: int, lost_seconds: float) -> None:
        """Jobs were told to leave."""
        _PREEMPTED.inc(jobs)
        _LOST_WORK.inc(max(0.0, lost_seconds))

    def changed(self, before: Job, after: Job) -> None:
        """A job changed."""
        for label, new in after.members.items():
            old = before.members.get(label)
            if old is not None and old is not new and new.restarts > old.restarts:
                _RESTARTS.labels(new.role).inc(new.restarts - old.restarts)
        if after.running_at and not before.running_at:
            _START.observe(max(0.0, after.running_at - after.placed_at))
            if after.id in self._ready_at:
                _FREE_TO_START.observe(max(0.0, after.running_at - self._ready_at.pop(after.id)))
        if after.attempt > before.attempt:
            self._ready_at[after.id] = max(self._freed_at, after.queued_at)
        elif after.placement is None or after.final:
            self._ready_at.pop(after.id, None)
        if _gave_room_back(planned_placement(before), planned_placement(after)):
            self._freed_at = time.time()
        if after.requeues > before.requeues:
            _REQUEUED.labels(after.events[-1].kind if after.events else "requeued").inc()
        if after.final and not before.final:
            _ENDED.labels(after.state).inc()

    def _pass(self, job: str, cause: str, now: float) -> None:
        """Books the time since the last cause of a job that now waits for another one."""
        before, since = self._waits.get(job, ("", now))
        if before != cause:
            self._waits[job] = (cause, now)
            if before:
                waited = self._waited.setdefault(job, {})
                waited[before] = waited.get(before, 0.0) + max(0.0, now - since)

    def observe(self, controller: "Controller") -> None:
        """Sets the gauges; once a round."""
        states = [job.state for job in controller.book.jobs.values()]
        for state in get_args(State):
            _JOBS.labels(state).set(states.count(state))
        causes = [wait.cause for wait in controller.planner.waits.values()]
        for cause in _CAUSES:
            _WAITING.labels(cause).set(causes.count(cause))
        parts = [part.state for job in controller.book.jobs.values() for part in job.parts]
        for state in ("waiting", "granted"):
            _GRANTS.labels(state).set(parts.count(state))
        self._observe_nodes(controller)

    def _observe_nodes(self, controller: "Controller") -> None:
        topology, nodes, room = controller.topology, controller.nodes, controller.ledger.room
        node_states = list(nodes.states.values())
        for state in ("down", "draining", "flapping"):
            _NODES.labels(state).set(node_states.count(state))
        open_N = nodes.open_nodes()
        available = int(open_N.sum())
        _NODES.labels("available").set(available)
        _NODES.labels("absent").set(topology.num_nodes - available)
        _NODES.labels("spare").set(len(nodes.spares))
        for column, (name, unit) in enumerate((("gpus", 1), ("cpus", 1000), ("memory_bytes", 1))):
            _RESOURCES.labels(name, "total").set(int(topology.capacity_NR[:, column].sum()) / unit)
            _RESOURCES.labels(name, "free").set(int(room.free_NR[:, column].sum()) / unit)
        total_N, free_N = topology.capacity_NR[open_N, 0], room.free_NR[open_N, 0]
        total, free = int(total_N.sum()), int(free_N.sum())
        _UTILISATION.set((total - free) / total if total else 0.0)
        _FRAGMENTATION.labels("node").set(int(free_N[free_N < total_N].sum()) / free if free else 0.0)
        if len(topology.levels) > 2:
            free_D = topology.sums(room.free_NR[:, 0] * open_N, 1)
            total_D = topology.sums(topology.capacity_NR[:, 0] * open_N, 1)
            broken = int(free_D[free_D < total_D].sum())
            _FRAGMENTATION.labels(topology.levels[1]).set(broken / free if free else 0.0)


def _gave_room_back(before: Placement | None, after: Placement | None) -> bool:
    """Whether the plan has room now that a job had before."""
    if before is None or before is after:
        return False
    if after is None:
        return True
    left = {(seat.node, seat.role) for seat in before.seats()} - {(seat.node, seat.role) for seat in after.seats()}
    return bool(left) or after.num_members < before.num_members
