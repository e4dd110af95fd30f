"""Jobs that end while others are promised their room: the plan stays as it was, over a restart too."""

from dataclasses import replace

import numpy as np
import pytest
from scheduler_in_memory import MemoryStore, a_book

from reflux_placement.gang import Assignment
from reflux_placement.policy.spares import SpareRule
from reflux_placement.policy.view import DEFAULT_QUEUE, Queue
from reflux_placement.topology import Node, Resources, build_topology
from reflux_scheduler import jobs, sightings
from reflux_scheduler.book import Book
from reflux_scheduler.claims import Claims
from reflux_scheduler.job import Job
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.nodes import Nodes
from reflux_scheduler.planner import Planner, Rules
from reflux_scheduler.spec import JobSpec, RoleTemplate

NODES = [Node(f"n{n}", Resources(4, 8000), {"rack": "r0"}) for n in range(2)]


async def started(book: Book, ledger: Ledger, name: str, number: int, node: int) -> Job:
    spec = JobSpec(name, (RoleTemplate("learner", 1, Resources(gpus=4), ("x",)),))
    job = await book.create(name, lambda _: Job(name, number, spec, created_at=0.0))
    placement = ledger.take(job, Assignment("cluster", 0, {"learner": np.array([node])}), 0)
    return await book.change(name, lambda job: jobs.placed(job, placement, 1.0))


@pytest.mark.parametrize("victim_number", [1, 3], ids=["older victim", "younger victim"])
@pytest.mark.parametrize("migrates", [False, True], ids=["preempted", "migrating"])
async def test_a_cancelled_job_does_not_take_back_room_that_is_promised_to_another(victim_number, migrates):
    store, ledger = MemoryStore(), Ledger(build_topology("c", NODES))
    book = a_book(store, ledger)
    victim = await started(book, ledger, "v", victim_number, 0)
    await book.change("v", lambda job: jobs.starting(job, 1.0))
    if migrates:
        ledger.room.release("jobs/v")
        there = ledger.take(victim, Assignment("cluster", 0, {"learner": np.array([1])}), 0)
        await book.change("v", lambda job: jobs.requeue(job, "moves", 2.0, then=there))
    else:
        await book.change("v", lambda job: jobs.requeue(job, "for w", 2.0, preempted_by="jobs/w"))
    winner = await started(book, ledger, "w", 2, 0)

    victim = await book.change("v", lambda job: jobs.end(job, "CANCELLED", "enough", 3.0))
    assert ledger.in_the_way(winner) == "jobs/v"
    assert ledger.room.free_NR[:, 0].tolist() == [0, 4]

    restarted = Ledger(ledger.topology)
    again = a_book(store, restarted)
    await again.load()
    assert again.homeless == {}
    assert restarted.in_the_way(again.get("w")) == "jobs/v"
    assert (restarted.room.free_NR == ledger.room.free_NR).all()

    (seat,) = victim.placement.seats()
    victim = await again.change("v", lambda job: sightings.stopped_member(job, seat, 4.0))
    assert victim.state == "CANCELLED"
    assert restarted.in_the_way(again.get("w")) == ""
    assert restarted.room.free_NR[:, 0].tolist() == [0, 4]


def test_a_job_that_is_ended_for_good_keeps_its_room_until_it_has_stopped():
    ledger = Ledger(build_topology("c", NODES))
    job = Job("a", 1, JobSpec("a", (RoleTemplate("learner", 1, Resources(gpus=4), ("x",)),)), created_at=0.0)
    placement = ledger.take(job, Assignment("cluster", 0, {"learner": np.array([0])}), 0)
    job = jobs.starting(jobs.placed(job, placement, 1.0), 1.0)
    job = jobs.end(job, "CANCELLED", "enough", 2.0)
    ledger.sync(job)
    assert ledger.room.free_NR[:, 0].tolist() == [0, 4]
    ledger.sync(replace(job, state="CANCELLED"))
    assert ledger.room.free_NR[:, 0].tolist() == [4, 4]


async def test_a_job_that_was_sent_back_has_waited_only_since_then():
    store, ledger = MemoryStore(), Ledger(build_topology("c", NODES))
    book = a_book(store, ledger)
    rules = Rules(queues={DEFAULT_QUEUE: Queue(name=DEFAULT_QUEUE)})
    nodes, metrics = Nodes(ledger.topology, SpareRule()), Metrics(ledger.topology.levels)
    planner = Planner(book, ledger, nodes, rules, Claims(store, ledger.topology), metrics)
    await started(book, ledger, "v", 1, 0)
    await book.create("w", lambda _: replace(book.get("v"), id="w", state="PENDING", placement=None, created_at=5.0))
    await book.change("v", lambda job: jobs.requeue(job, "for w", 20000.0, preempted_by="jobs/w"))
    assert {ask.job: ask.submitted_at for ask in planner.view(20001.0).pending} == {"jobs/v": 20000.0, "jobs/w": 5.0}
