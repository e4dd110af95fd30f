"""Does the policy ever starve a job, hand out room twice, run part of a gang, break a quota or preempt wrongly?

Random events (jobs come, end, run over, are cancelled; nodes die, drain, flap and come back; checkpoints; restarts of
the scheduler; victims that take their time to stop) over the production `decide()` on a small cluster with nested
queues. Every action is judged by plain counting that shares nothing with the policy. Every 2,000 events arrivals
stop, nodes come back and jobs end: then all that can run at all must have run within a bound on departures.
Last line: one JSON object.
"""

import argparse
import json
import sys
import time

import numpy as np
from random_events import QUEUES, RandomEvents, Violations, queues_above

from reflux_placement.gang import Assignment, GangDemand
from reflux_placement.place.check import broken
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.cycle import DEFAULT_CONFIG, decide
from reflux_placement.policy.view import (
    Action,
    Ask,
    Decision,
    Live,
    Migrate,
    Preempt,
    Replace,
    Requeue,
    Resize,
    Start,
    View,
)
from reflux_placement.room import Room

EVENTS, BATCH, CALM_EVERY = 100_000, 20, 2000


class World(RandomEvents):
    """What really happens; it believes no word of the policy."""

    # --- the cycle ---

    def cycle(self) -> Decision:
        """Asks the policy and carries out what it says, under suspicion."""
        self.found.cycles += 1
        pending = list(self.pending.values())
        self.rng.shuffle(pending)
        told = {job for claim in self.claims if claim.evicting for job in claim.after}
        shown = self.stopping & told if self.rng.random() < 0.5 else set()
        view = View(
            room=self._open(self.room.copy()), pending=pending,
            live={job: each for job, each in self.live.items() if job not in self.stopping or job in shown},
            queues=QUEUES, nodes=dict(self.nodes), spares=self.spares, claims=self.claims, now=self.now,
        )  # fmt: skip
        decision = decide(view, self.config)
        kept = {claim.job: claim for claim in decision.claims if claim.evicting}
        self.booked = {claim.job: claim for claim in self.claims if claim.evicting and claim.job in kept}
        self._check_promises(decision)
        self.claims = decision.claims
        for action in decision.actions:
            self.found.actions[type(action).__name__] += 1
            self._carry_out(action)
            for claim in kept.values():
                touched = action.victims if isinstance(action, Preempt) else (getattr(action, "job", ""),)
                if set(touched) & set(claim.after):
                    self.booked[claim.job] = claim
        self._all_told(decision)
        self._count_room()
        return decision

    def _open(self, room: Room) -> Room:
        room.open_N[[*self.nodes, *self.spares]] = False
        return room

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Preempt():
                self._preempt(action)
            case Requeue():
                self.stopping.add(action.job)
            case Resize() | Replace():
                self._move(action.job, action.assignment, resized=isinstance(action, Resize))
            case Migrate():
                olds = [(job, place, self.room.holdings[job]) for job, place in action.moves]
                self.room.release_all(job for job, _ in action.moves)
                for job, place, old in olds:
                    self._place(job, old.demand, place)

    def _start(self, action: Start) -> None:
        ask = self.pending.pop(action.job, None)
        if ask is None:
            self.found.add("lost", f"{action.job} started, but was not pending")
            return
        if self._place(action.job, ask.gang, action.assignment):
            self.live[action.job] = Live(ask=ask, started_at=self.now, saved_at=self.now)
            self._check_limits(ask.queue, action.job)
        else:
            self.pending[action.job] = ask

    def _place(self, job: str, gang: GangDemand, assignment: Assignment) -> bool:
        for role in gang.roles:
            if not role.least <= len(assignment.nodes.get(role.role, ())) <= role.most:
                self.found.add("partial", f"{job}: {role.role} has {len(assignment.nodes.get(role.role, ()))}")
                return False
        used = {int(node) for node in assignment.used_nodes()}
        before = self.room.holdings.get(job)
        new = used - ({int(node) for node in before.node_M} if before else set())
        if new & (set(self.nodes) | self.spares):
            self.found.add("misplaced", f"{job} went to a node that is away")
        problem = broken(self.topology, self.room.free_NR, gang, assignment)
        if problem is not None:
            self.found.add("overcommitted" if "too little free" in problem else "misplaced", f"{job}: {problem}")
            return False
        self.room.take(job, gang, assignment)
        return True

    def _move(self, job: str, assignment: Assignment, *, resized: bool) -> None:
        old = self.room.holdings.get(job)
        if old is None or job in self.stopping:
            self.found.add("lost", f"{job} was resized or repaired, but does not run")
            return
        self.room.release(job)
        kept = {role: ranks[: len(old.assignment.nodes[role])] for role, ranks in assignment.nodes.items()}
        if resized and any((ranks != old.assignment.nodes[role][: len(ranks)]).any() for role, ranks in kept.items()):
            self.found.add("misplaced", f"{job}: a resize moved members that stay")
        away, self.nodes = self.nodes, {n: s for n, s in self.nodes.items() if n not in set(old.node_M.tolist())}
        if not self._place(job, old.demand, assignment):
            self.room.restore(job, old)
        self.nodes = away

    def _preempt(self, action: Preempt) -> None:
        ask = self.pending.get(action.beneficiary)
        if ask is None or any(victim not in self.live or victim in self.stopping for victim in action.victims):
            self.found.add("lost", f"{action.beneficiary} or its victims are not there")
            return
        self.booked.pop(ask.job, None)  # its claim came to nothing
        for victim in action.victims:
            self._check_victim(ask, self.live[victim])
        self._check_helps(ask, action)
        self.stopping.update(action.victims)

    def _check_victim(self, ask: Ask, live: Live) -> None:
        other = live.ask
        if not other.preemptible or self.now - live.started_at < other.min_run_seconds:
            self.found.add("preempted", f"{other.job} must not be preempted")
        if other.priority >= ask.priority and not self._reclaims(ask, other):
            self.found.add("preempted", f"{other.job} has priority {other.priority}, {ask.job} has {ask.priority}")

    def _reclaims(self, ask: Ask, other: Ask) -> bool:
        """Whether the victim's side borrows (all that it holds, if nothing is guaranteed to it) and the beneficiary's
        side stays inside its guarantee, in GPUs."""
        mine, theirs = queues_above(ask.queue), queues_above(other.queue)
        mine, theirs = [q for q in mine if q not in theirs], [q for q in theirs if q not in mine]
        if not mine or not theirs:
            return False
        guarantee = QUEUES[mine[-1]].guaranteed.gpus if mine[-1] in QUEUES else 0
        least = ask.gang.least_total().gpus
        promised = {q: QUEUES[q].guaranteed.gpus if q in QUEUES else 0 for q in theirs}
        borrows = all(not gpus or self._used(q) > gpus for q, gpus in promised.items())
        return borrows and self._used(mine[-1]) + least <= guarantee

    def _check_helps(self, ask: Ask, action: Preempt) -> None:
        """The whole gang fits at the claim once everybody who was told to stop has stopped, and not before."""
        claim = next((each for each in self.claims if each.job == ask.job), None)
        if claim is None:
            self.found.add("preempted", f"nothing is kept for {ask.job}")
            return
        after = self.room.copy()
        after.release_all([*self.stopping, *action.victims])
        problem = broken(self.topology, after.free_NR, ask.gang, claim.assignment)
        if problem is not None:
            self.found.add("preempted", f"{ask.job} does not fit after its preemption: {problem}")

    # --- checks ---

    def _check_promises(self, decision: Decision) -> None:
        """Room that was freed for a job stays with it, unless its nodes are away or a broken gang was mended there."""
        started = {action.job for action in decision.actions if isinstance(action, Start)}
        kept = started | {claim.job for claim in decision.claims}
        mended = any(isinstance(action, Replace) for action in decision.actions)
        for claim in self.claims:
            away = any(int(node) in self.nodes for node in claim.assignment.used_nodes())
            if claim.evicting and claim.job in self.pending and not (claim.job in kept or away or mended):
                self.found.add("lost", f"the room that was freed for {claim.job} was given away")

    def _used(self, queue: str) -> int:
        """GPUs of a queue: what runs and was not told to stop, and what was freed for its jobs."""
        running = (job for job, live in self.live.items() if queue in queues_above(live.ask.queue))
        used = sum(self.room.holdings[job].amount.gpus for job in running if job not in self.stopping)
        for claim in self.booked.values():
            ask = self.pending.get(claim.job)
            if ask is not None and queue in queues_above(ask.queue):
                used += sum(role.each.gpus * len(claim.assignment.nodes[role.role]) for role in ask.gang.roles)
        return used

    def _check_limits(self, queue: str, job: str) -> None:
        for name in queues_above(queue):
            limit = QUEUES[name].limit if name in QUEUES else None
            if limit is not None and self._used(name) > limit.gpus:
                self.found.add("quota", f"{name} is above its limit after {job}")

    def _count_room(self) -> None:
        held = np.zeros_like(self.topology.capacity_NR)
        for holding in self.room.holdings.values():
            for demand in holding.demand.roles:
                for node in holding.assignment.nodes.get(demand.role, ()):
                    held[node] += np.array(demand.each.row)
        if (held > self.topology.capacity_NR).any():
            self.found.add("overcommitted", f"at {self.now:.0f} s")

    def _all_told(self, decision: Decision) -> None:
        """Every job that is still pending knows why."""
        silent = set(self.pending) - set(decision.waits)
        if silent:
            self.found.add("lost", f"{sorted(silent)} wait without a reason")

    # --- calm ---

    def calm(self) -> None:
        """No arrivals, no faults; one live job ends per round. Whatever can run must run, and nothing may hang."""
        self.nodes.clear()
        rounds = 3 * (len(self.pending) + len(self.live) + len(self.stopping)) + 10
        for _ in range(rounds):
            while self.stopping:
                self.stop_one()
            self.cycle()
            if not self.stopping:
                self.now += 30.0
                self.end()
            if not any(self._can_run(ask) for ask in self.pending.values()):
                break
        hungry = [ask.job for ask in self.pending.values() if self._can_run(ask)]
        if hungry:
            self.found.add("starved", f"{hungry} after {rounds} rounds")
        self.pending.clear()
        self.gangs = self.random_gangs()

    def _can_run(self, ask: Ask) -> bool:
        """Whether the job could run alone on the whole cluster."""
        least = ask.gang.least_total()
        limits = [QUEUES[name].limit for name in queues_above(ask.queue) if name in QUEUES]
        inside = all(limit is None or least.gpus <= limit.gpus for limit in limits)
        if not ask.preemptible:  # what is guaranteed to others is not for it
            inside = inside and _firm_room(ask.queue) >= least.gpus
        return inside and self.feasible[ask.gang]


def _firm_room(queue: str) -> int:
    """GPUs that no sibling of the queue or of those above it is guaranteed."""
    room = 68
    for name in reversed(queues_above(queue)):
        parent = QUEUES[name].parent if name in QUEUES else ""
        own = QUEUES[name].guaranteed.gpus if name in QUEUES else 0
        others = sum(q.guaranteed.gpus for q in QUEUES.values() if q.parent == parent and q.name != name)
        room = max(own, room - others)
        limit = QUEUES[name].limit if name in QUEUES else None
        room = min(room, limit.gpus) if limit is not None else room
    return room


def violations(events: int, seed: int, config: PolicyConfig = DEFAULT_CONFIG) -> Violations:
    """Counts what must never happen in so many random events. Deterministic."""
    world = World(seed, config)
    while world.found.events < events:
        for _ in range(world.rng.randint(1, 2 * BATCH - 1)):
            world.event()
        if world.rng.random() < 0.01:
            world.claims = ()
        world.cycle()
        if world.found.events // CALM_EVERY > (world.found.events - 2 * BATCH) // CALM_EVERY:
            world.calm()
    world.calm()
    return world.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.perf_counter()
    found = violations(options.events, options.seed)
    for note in found.notes:
        print(note)
    print(f"{found.events} events, {found.cycles} cycles, {dict(found.actions)} in {time.perf_counter() - begun:.1f} s")
    print(json.dumps({"violations": found.total}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
