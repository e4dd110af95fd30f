"""Nobody is started where somebody else still runs: random histories of the whole scheduler, and its single rules."""

import asyncio
import random
import time

import numpy as np
import pytest
from fake_cluster import until
from scheduler_in_memory import Exact, InMemory, MemoryStore

from reflux_placement.gang import Assignment
from reflux_placement.topology import Node, Resources, Topology, build_topology
from reflux_scheduler import jobs, sightings
from reflux_scheduler.backends.local import LocalBackend
from reflux_scheduler.job import Heard, Job, Placement, Report, RolePlaces
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.spec import JobSpec, RoleTemplate


def topology(count: int = 4) -> Topology:
    return build_topology("c", [Node(f"n{n}", Resources(4, 64000), {"rack": f"r{n // 2}"}) for n in range(count)])


def spec(count: int, gpus: int = 4, *, priority: int = 0, **fields) -> JobSpec:
    role = RoleTemplate("w", count, Resources(gpus), ("x",), max_restarts=9, **fields)
    return JobSpec("t", (role,), priority=priority)


def running(ledger: Ledger, name: str, asked: JobSpec, *nodes: int) -> Job:
    job = Job(name, 1, asked, created_at=0.0)
    placement = ledger.take(job, Assignment("cluster", 0, {"w": np.array(nodes)}), 0)
    job = jobs.starting(jobs.placed(job, placement, 1.0), 1.0)
    for seat in placement.seats():
        report = Report(job.role_id(seat), "running", pid=1, revision=1, attempt=1)
        job = sightings.observe(job, {(seat.node, ""): Heard("i", {report.role_id: report})}, 2.0)
    ledger.sync(job)
    return job


def moved(ledger: Ledger, job: Job, *nodes: int) -> Job:
    placement = ledger.take(job, Assignment("cluster", 0, {"w": np.array(nodes)}), 0)
    job = jobs.moved(job, placement, "resized", "for the test", 3.0)
    ledger.sync(job)
    return job


def blocked(ledger: Ledger, job: Job) -> dict[str, str]:
    return {seat.label: other for seat, other in ledger.blockers(job, jobs.to_start(job)).items()}


def test_a_grown_member_waits_for_a_preempted_job_to_leave_its_gpus():
    ledger = Ledger(topology())
    growing, victim = running(ledger, "g", spec(1, min_count=1, max_count=3), 0), running(ledger, "a", spec(1), 1)
    ledger.sync(jobs.requeue(victim, "for b", 2.0, preempted_by="jobs/b"))
    growing = moved(ledger, growing, 0, 1, 2)
    assert blocked(ledger, growing) == {"w/1": "jobs/a"}
    (seat,) = victim.placement.seats()
    ledger.sync(sightings.stopped_member(jobs.requeue(victim, "for b", 2.0, preempted_by="jobs/b"), seat, 4.0))
    assert ledger.take_left()
    assert blocked(ledger, growing) == {}


def test_a_member_waits_for_another_of_its_own_job_to_leave_its_place():
    ledger = Ledger(topology())
    job = moved(ledger, running(ledger, "g", spec(2), 0, 1), 2, 0)
    assert blocked(ledger, jobs.retired(job, job.retiring[1])) == {"w/1": "jobs/g"}
    assert [seat.node for seat in job.retiring] == ["n0", "n1"]


def test_a_member_waits_for_its_own_gpus_even_where_as_many_others_are_free():
    ledger = Ledger(topology())
    growing = running(ledger, "g", spec(1, 2, min_count=1, max_count=2), 1)
    victim = running(ledger, "a", spec(1, 2), 0)
    ledger.sync(jobs.requeue(victim, "away", 2.0))
    assert blocked(ledger, moved(ledger, growing, 1, 0)) == {"w/1": "jobs/a"}


def test_a_member_waits_for_memory_that_a_leaver_still_has():
    ledger = Ledger(
        build_topology("c", [Node("n0", Resources(0, 1000, 100), {}), Node("n1", Resources(0, 1000, 100), {})])
    )

    def asked(count: int) -> JobSpec:
        return JobSpec("t", (RoleTemplate("w", count, Resources(0, 0, 60), ("x",), min_count=1, max_count=2),))

    growing, victim = running(ledger, "g", asked(1), 0), running(ledger, "a", asked(1), 1)
    ledger.sync(jobs.requeue(victim, "away", 2.0))
    assert blocked(ledger, moved(ledger, growing, 0, 1)) == {"w/1": "jobs/a"}


def test_a_place_that_is_left_before_the_agent_answered_is_not_given_away_at_once():
    ledger = Ledger(topology())
    job = Job("g", 1, spec(2, min_count=1), created_at=0.0)
    placement = ledger.take(job, Assignment("cluster", 0, {"w": np.array([0, 1])}), 0)
    job = jobs.starting(jobs.placed(job, placement, 1.0), 1.0)
    one = Placement("node", "n0", (RolePlaces("w", ("n0",), placement.roles[0].gpus[:1], (0,)),))
    job = jobs.moved(job, one, "resized", "smaller", 2.0)
    assert [seat.node for seat in job.retiring] == ["n1"]


class History:
    """Random events on a scheduler of four nodes, and what must hold after each."""

    def __init__(self, seed: int, cluster: Exact | None = None) -> None:
        self.random = random.Random(seed)
        self.here = topology()
        self.store = MemoryStore()
        self.cluster = cluster
        self.world = self.reign()
        self.nodes = [node.name for node in self.here.nodes]
        self.count = 0

    def reign(self) -> InMemory:
        """The scheduler after a start, on what is stored."""
        world = InMemory(self.here, self.cluster or LocalBackend(), self.store)
        if self.cluster is not None:
            self.cluster.world = world
        return world

    async def settle(self) -> None:
        """Lets the scheduler go on for a random while, mostly not to its end."""
        for _ in range(self.random.choice((1, 3, 10, 40))):
            await asyncio.sleep(0)
        assert self.world.machines.faults == []

    def attach(self) -> None:
        """All agents that live find the scheduler, with what runs under them."""
        for post in self.posts():
            if post[0] not in self.world.machines.dead:
                self.world.machines.up(post)
                assert self.world.controller.registered(post) == []

    def posts(self) -> list[tuple[str, str]]:
        """Where agents run on nodes that live."""
        if self.cluster is None:
            return [(node, "") for node in self.nodes]
        given = [grant_id for grant_id, status in self.cluster.given.items() if status.state == "granted"]
        return [
            (node, grant_id)
            for grant_id in given
            for node in self.cluster.shares[grant_id]
            if node not in self.cluster.given[grant_id].lost_nodes
        ]

    async def event(self) -> None:
        choose, world = self.random, self.world
        alive = [job for job in world.jobs.values() if not job.final]
        kind = choose.choices(
            ("create", "cancel", "leave", "lose", "up", "drain", "saved", "refuse", "wait"), (6, 3, 5, 1, 2, 1, 2, 1, 2)
        )[0]
        if kind == "create" and len(alive) < 6:
            count, gpus = choose.choice((1, 1, 2, 3, 4)), choose.choice((1, 2, 2, 4))
            elastic = {"min_count": 1, "max_count": 6} if choose.random() < 0.5 else {}
            self.count += 1
            await world.controller.create(spec(count, gpus, priority=choose.randrange(4), **elastic), str(self.count))
        elif kind == "cancel" and alive:
            leaving = [job for job in alive if job.ending is not None]
            await world.controller.cancel(choose.choice(leaving if leaving and choose.random() < 0.7 else alive).id)
        elif kind == "leave" and world.machines.leaving:
            world.machines.leave(choose.choice(list(world.machines.leaving)))
        elif kind == "lose" and not world.machines.dead:
            node = choose.choice(self.nodes)
            world.machines.lose((node, "")) if self.cluster is None else self.cluster.lose(node)
            world.fleet.registrations += 1
            world.controller.wake()
        elif kind == "up":
            back = set(world.machines.dead)
            world.machines.dead.clear()
            for post in self.posts():
                if post[0] in back:
                    world.machines.up(post)
                    world.controller.registered(post)
        elif kind == "refuse" and self.cluster is not None:
            self.cluster.refuses = not self.cluster.refuses
        elif kind == "drain":
            await world.controller.drain(choose.choice(self.nodes), choose.choice((None, "test")))
        elif kind == "saved" and alive:
            await world.controller.saved(choose.choice(alive).id)
        elif kind == "wait":
            await asyncio.sleep(0.01)

    def at_rest(self) -> bool:
        """Every job waits and has no process, or runs with all of them; nobody is about to leave."""
        machines, expected = self.world.machines, set()
        for job in self.world.jobs.values():
            if job.final or job.state == "PENDING":
                continue
            if job.state != "RUNNING" or job.ending is not None or job.retiring:
                return False
            expected |= {
                ((seat.node, job.grant_id(seat.part)), f"{job.id}/{seat.label}") for seat in job.placement.seats()
            }
        return machines.running.keys() == expected and not machines.leaving

    async def rest(self) -> None:
        self.world.machines.slow = False
        for key in list(self.world.machines.leaving):
            self.world.machines.leave(key)
        for node in self.nodes:
            await self.world.controller.drain(node, None)
        self.world.forget_absent_agents()
        await until(self.at_rest)


async def run_history(seed: int, events: int, cluster: Exact | None = None) -> None:
    history = History(seed, cluster)
    choose = history.random
    for last in (False, True):
        async with history.world.running():
            history.attach()
            history.world.machines.slow = True
            for _ in range(choose.randrange(events)):
                await history.event()
                await history.settle()
            if last:
                await history.rest()
                await end_all(history)
        if not last:
            before, history.world = history.world, history.reign()
            history.world.machines.take_over(before.machines)


async def end_all(history: History) -> None:
    world = history.world
    for job in list(world.jobs.values()):
        await world.controller.cancel(job.id)
    await until(lambda: all(job.final for job in world.jobs.values()))
    assert world.machines.running == {}
    # A cycle that was about to place one of them takes its booking back.
    await until(lambda: not world.ledger.planned)
    assert (world.ledger.room.free_NR == history.here.capacity_NR).all()
    if history.cluster is not None:
        await until(lambda: not history.cluster.given)
    assert world.machines.faults == []


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_no_gpu_is_used_twice_and_no_gang_runs_in_part(seed):
    await run_history(seed, 60)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_on_a_cluster_that_grants_room_nothing_stays_behind(seed):
    await run_history(seed, 60, Exact("n0", "n1", "n2", "n3"))


@pytest.mark.slow
async def test_no_gpu_is_used_twice_in_many_histories():
    began, seed = time.monotonic(), 1000
    while time.monotonic() - began < 60:
        await run_history(seed, 200)
        seed += 1
