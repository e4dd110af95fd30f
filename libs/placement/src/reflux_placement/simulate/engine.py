"""Owns the discrete-event loop: arrivals, ends, checkpoints, faults; one cycle of the policy per moment at which
something happened. It applies what the policy decides to its own books, so that a policy that hands out room twice,
starts part of a gang or uses a lost node is found out (PolicyViolation).
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment
from reflux_placement.policy.view import (
    Action,
    Ask,
    Claim,
    Live,
    Migrate,
    NodeState,
    Preempt,
    Queue,
    Replace,
    Requeue,
    Resize,
    Start,
    View,
)
from reflux_placement.room import Room
from reflux_placement.simulate.history import End, History, JobRecord
from reflux_placement.simulate.jobs import DEFAULT_OPTIONS, Fault, Options, Policy, SimJob
from reflux_placement.simulate.running import Running, counts_fit, place
from reflux_placement.simulate.sampler import Sampler
from reflux_placement.topology import Topology

_END, _RETURN, _FAULT, _ARRIVE, _WAKE = range(5)
Progress = Callable[[float, int, int], None]
"""Told (time, jobs ended, jobs pending) after every cycle."""


class PolicyViolation(AssertionError):
    """The policy decided what must never happen; the message says what and when."""


def simulate(
    topology: Topology,
    jobs: Sequence[SimJob],
    policy: Policy,
    *,
    options: Options = DEFAULT_OPTIONS,
    queues: Mapping[str, Queue] | None = None,
    faults: Sequence[Fault] = (),
    progress: Progress | None = None,
) -> History:
    """Runs all jobs to their end under a policy. Deterministic: equal arguments give an equal history.

    Raises:
        PolicyViolation: the policy double-booked, started part of a gang, or acted on a job that is not there.
        UnknownLevel: a gang names a level that the topology does not have.
    """
    for job in jobs:
        job.gang.check_levels(topology)
    return _Simulation(topology, jobs, policy, options, queues or {}, faults, progress).run()


class _Simulation:
    def __init__(
        self, topology: Topology, jobs: Sequence[SimJob], policy: Policy, options: Options,
        queues: Mapping[str, Queue], faults: Sequence[Fault], progress: Progress | None,
    ) -> None:  # fmt: skip
        self._topology, self._policy, self._options, self._queues = topology, policy, options, queues
        self._progress = progress
        self._room = Room(topology)
        self._room.open_N[list(options.spares)] = False
        self._records = {job.name: JobRecord(job) for job in jobs}
        self._numbers = {job.name: number for number, job in enumerate(jobs)}
        self._pending: dict[str, Ask] = {}
        self._saved: dict[str, float] = {}
        self._running: dict[str, Running] = {}
        self._live: dict[str, Live] = {}
        self._claims: tuple[Claim, ...] = ()
        self._away: dict[int, list[Fault]] = {}
        self._any_elastic = any(role.most > role.least for job in jobs for role in job.gang.roles)
        self._sampler = Sampler(topology, jobs, options.samples)
        self._cycles = self._ended = 0
        self._sequence = itertools.count()
        self._events: list[tuple[float, int, int, object]] = []
        self._checkpoints: list[tuple[float, int, str, int, bool]] = []
        for job in jobs:
            self._push(job.arrives_at, _ARRIVE, job)
        for fault in faults:
            self._push(fault.at, _FAULT, fault)

    def run(self) -> History:
        """The loop: everything of one moment, then one cycle."""
        while self._events:
            now = self._events[0][0]
            self._sampler.until(now, self._room, self._pending)
            changed = False
            while self._events and self._events[0][0] <= now:
                _, kind, _, what = heapq.heappop(self._events)
                changed |= self._take(now, kind, what)
            if changed and (self._pending or self._away or self._may_grow()):
                self._cycle(now)
        return History(self._topology, tuple(self._records.values()), tuple(self._sampler.samples), self._cycles)

    def _push(self, at: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (at, kind, next(self._sequence), what))

    def _may_grow(self) -> bool:
        return self._any_elastic and any(
            role.most > role.least for live in self._live.values() for role in live.ask.gang.roles
        )

    # --- events ---

    def _take(self, now: float, kind: int, what: object) -> bool:
        """Takes one event; False if nothing changed."""
        if kind == _END:
            name, version = what  # pyright: ignore[reportGeneralTypeIssues]
            return self._end(now, name, version)
        if kind == _ARRIVE:
            assert isinstance(what, SimJob)
            self._pending[what.name] = self._ask(what, what.seconds)
        elif isinstance(what, Fault):
            self._fault(now, what) if kind == _FAULT else self._return(now, what)
        return True

    def _ask(self, job: SimJob, left: float) -> Ask:
        told = job.seconds if job.estimate_seconds is None else job.estimate_seconds
        return Ask(
            job=job.name, number=self._numbers[job.name], gang=job.gang, submitted_at=job.arrives_at, queue=job.queue,
            priority=job.priority, preemptible=job.preemptible, expected_seconds=told * left / job.seconds,
            min_run_seconds=job.min_run_seconds,
        )  # fmt: skip

    def _end(self, now: float, name: str, version: int) -> bool:
        running = self._running.get(name)
        if running is None or running.version != version or running.broken:
            return False
        self._leave(name, now, "done")
        self._records[name].ended_at = now
        self._ended += 1
        return True

    def _fault(self, now: float, fault: Fault) -> None:
        self._away.setdefault(fault.node, []).append(fault)
        self._room.open_N[fault.node] = False
        self._push(now + fault.seconds, _RETURN, fault)
        if fault.state != "down":
            return
        for name in self._room.jobs_on(fault.node):
            running = self._running[name]
            if not running.broken:
                self._records[name].lost_gpu_seconds += running.break_down(now)
                self._records[name].failures += 1
                self._show(name, now)

    def _return(self, now: float, fault: Fault) -> None:
        self._away[fault.node].remove(fault)
        if self._away[fault.node]:
            return
        del self._away[fault.node]
        self._room.open_N[fault.node] = fault.node not in self._options.spares
        for name in self._room.jobs_on(fault.node):
            running = self._running[name]
            if running.broken and not any(int(node) in self._down() for node in running.holding.node_M):
                running.broken, running.since = False, now + self._options.restart_seconds
                running.version += 1
                self._schedule(name, now)

    def _down(self) -> dict[int, NodeState]:
        return {node: faults[-1].state for node, faults in self._away.items()}

    # --- the cycle ---

    def _cycle(self, now: float) -> None:
        self._save(now)
        view = View(
            room=self._room.copy(), pending=tuple(self._pending.values()), live=MappingProxyType(self._live),
            queues=self._queues, nodes=self._down(), spares=self._options.spares, claims=self._claims, now=now,
        )  # fmt: skip
        decision = self._policy(view)
        self._cycles += 1
        self._claims = decision.claims
        for action in decision.actions:
            try:
                self._apply(now, action)
            except Occupied as error:
                raise PolicyViolation(f"at {now:.0f} s: {type(action).__name__}: {error}") from error
        if self._pending and self._options.wake_seconds:
            self._wake(now)
        if self._progress is not None:
            self._progress(now, self._ended, len(self._pending))

    def _wake(self, now: float) -> None:
        at = now + self._options.wake_seconds
        if self._running and (not self._events or self._events[0][0] > at):
            self._push(at, _WAKE, None)

    def _save(self, now: float) -> None:
        """Brings saved_at of every live job up to now; checkpoints start no cycle of their own."""
        while self._checkpoints and self._checkpoints[0][0] <= now:
            _, _, name, version, stale = heapq.heappop(self._checkpoints)
            running = self._running.get(name)
            if running is not None and running.version == version and not running.broken:
                self._show(name, now)
                if not stale:
                    self._next_checkpoint(name, running.saved_at(now))

    def _next_checkpoint(self, name: str, saved_at: float) -> None:
        """Notes when the live job looks different again: at its next checkpoint, and when the last one is stale."""
        running = self._running[name]
        if running.job.checkpoint_seconds:
            after = math.nextafter(saved_at + self._options.movable_seconds, math.inf)
            for at, stale in ((saved_at + running.job.checkpoint_seconds, False), (after, True)):
                heapq.heappush(self._checkpoints, (at, next(self._sequence), name, running.version, stale))

    def _show(self, name: str, now: float) -> None:
        running = self._running[name]
        saved_at = running.saved_at(now)
        fresh = saved_at > running.since and now - saved_at <= self._options.movable_seconds
        self._live[name] = Live(ask=running.ask, started_at=running.started_at, saved_at=saved_at, movable=fresh)

    # --- actions ---

    def _apply(self, now: float, action: Action) -> None:
        match action:
            case Start():
                self._check(now, action.job, action.job in self._pending, action.assignment)
                self._pending.pop(action.job)
                self._settle(now, action.job, action.assignment, now, self._saved.pop(action.job, 0.0))
            case Preempt():
                for victim in action.victims:
                    self._stop(now, victim, "preempted")
            case Requeue():
                self._stop(now, action.job, "failed")
            case Resize() | Replace():
                self._move(now, [(action.job, action.assignment)], "resized" if type(action) is Resize else "failed")
            case Migrate():
                self._move(now, list(action.moves), "moved")

    def _check(self, now: float, job: str, known: bool, assignment: Assignment) -> None:
        if not known:
            raise PolicyViolation(f"at {now:.0f} s: {job} is not in the state that the policy acted on")
        if not counts_fit(self._records[job].job, assignment):
            raise PolicyViolation(f"at {now:.0f} s: {job} would run as part of a gang")
        down = self._down()
        if down and any(int(node) in down for node in assignment.used_nodes()):
            raise PolicyViolation(f"at {now:.0f} s: {job} was sent to a node that is away")

    def _stop(self, now: float, name: str, why: End) -> None:
        if name not in self._running:
            raise PolicyViolation(f"at {now:.0f} s: {name} does not run and cannot be stopped")
        running, record = self._running[name], self._records[name]
        saved = running.saved_work(now)
        record.lost_gpu_seconds += (running.work_at(now) - saved) * record.job.gpus if not running.broken else 0.0
        record.preemptions += why == "preempted"
        self._leave(name, now, why)
        self._saved[name] = saved
        self._pending[name] = self._ask(record.job, record.job.seconds - saved)

    def _move(self, now: float, moves: Sequence[tuple[str, Assignment]], why: End) -> None:
        """Several jobs give up their places, then take the new ones: all of them at once, or a swap would not work."""
        before = {}
        for name, assignment in moves:
            self._check(now, name, name in self._running, assignment)
            running = self._running[name]
            keep = why == "resized" and not running.broken
            saved = running.work_at(now) if keep else running.saved_work(now)
            lost = 0.0 if running.broken else running.work_at(now) - saved
            self._records[name].lost_gpu_seconds += lost * running.job.gpus
            before[name] = (running.started_at, saved)
            self._leave(name, now, why)
        for name, assignment in moves:
            self._settle(now, name, assignment, *before[name], delay=self._options.restart_seconds)

    def _leave(self, name: str, now: float, why: End) -> None:
        running = self._running.pop(name)
        del self._live[name]
        self._room.release(name)
        self._records[name].stays.append(running.stay(self._topology, now, why))

    def _settle(
        self, now: float, name: str, assignment: Assignment, started_at: float, done: float, *, delay: float = 0.0
    ) -> None:
        record = self._records[name]
        ask = self._ask(record.job, record.job.seconds - done)
        holding = self._room.take(name, record.job.gang, assignment)
        if done and not delay:
            delay = self._options.restart_seconds
        running = place(
            record.job, ask, holding, self._topology, self._options,
            now=now, started_at=started_at, done=done, version=next(self._sequence), delay=delay,
        )  # fmt: skip
        self._running[name] = running
        self._schedule(name, now)

    def _schedule(self, name: str, now: float) -> None:
        running = self._running[name]
        self._push(running.ends_at, _END, (name, running.version))
        self._show(name, now)
        self._next_checkpoint(name, running.since)
