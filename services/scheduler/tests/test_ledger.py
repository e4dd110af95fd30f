"""The plan: bookings that follow from jobs, room that is promised while others still stand in it, stored claims."""

from dataclasses import replace

import numpy as np
import pytest

from reflux_placement.errors import Occupied
from reflux_placement.gang import Assignment
from reflux_placement.policy.view import Claim
from reflux_placement.topology import Node, Resources, Topology, build_topology
from reflux_scheduler import jobs, sightings
from reflux_scheduler.claims import Claims
from reflux_scheduler.job import Job
from reflux_scheduler.ledger import Ledger, gpus_on, shares, usage
from reflux_scheduler.spec import JobSpec, RoleTemplate
from reflux_scheduler.store import LEADER, Store


def topology() -> Topology:
    nodes = [Node(f"n{n}", Resources(4, 8000), {"rack": f"r{n // 2}"}) for n in range(4)]
    return build_topology("c", nodes)


def job(name: str, count: int, gpus: int = 4) -> Job:
    role = RoleTemplate("learner", count, Resources(gpus, 100), ("x",), max_restarts=1)
    return Job(name, 1, JobSpec("t", (role,)), created_at=0.0)


def assignment(*nodes: int) -> Assignment:
    return Assignment("cluster", 0, {"learner": np.array(nodes, dtype=np.int64)})


def placed(ledger: Ledger, name: str, *nodes: int, gpus: int = 4) -> Job:
    asked = job(name, len(nodes), gpus)
    after = jobs.placed(asked, ledger.take(asked, assignment(*nodes), 0), 1.0)
    ledger.sync(after)
    return after


def test_bookings_after_a_restart_are_those_of_the_stored_jobs():
    first = Ledger(topology())
    held = [placed(first, "a", 0, 1), placed(first, "b", 2, 2, gpus=2)]
    second = Ledger(topology())
    for each in held:
        second.sync(each)
    assert (second.room.free_NR == first.room.free_NR).all()
    with pytest.raises(Occupied):
        second.take(job("c", 1), assignment(2), 0)
    second.sync(replace(held[0], state="CANCELLED"))
    assert second.room.free_NR[:2, 0].tolist() == [4, 4]


def test_room_of_a_preempted_job_is_promised_at_once_and_used_when_it_has_left():
    ledger = Ledger(topology())
    victim = jobs.starting(placed(ledger, "a", 0, 1), 2.0)
    leaving = jobs.requeue(victim, "for b", 3.0, preempted_by="jobs/b")
    ledger.sync(leaving)
    winner = placed(ledger, "b", 1)
    assert ledger.in_the_way(winner) == "jobs/a"
    assert ledger.in_the_way(placed(ledger, "c", 3)) == ""
    for seat in leaving.placement.seats():
        leaving = sightings.stopped_member(leaving, seat, 4.0)
    ledger.sync(leaving)
    assert leaving.state == "PENDING"
    assert ledger.take_left()
    assert ledger.in_the_way(winner) == ""


def test_a_leaver_with_other_gpus_of_a_node_is_in_nobodys_way():
    ledger = Ledger(topology())
    victim = jobs.starting(placed(ledger, "a", 0, gpus=1), 2.0)
    neighbour = placed(ledger, "b", 0, gpus=2)
    ledger.sync(jobs.requeue(victim, "for c", 3.0))
    assert ledger.in_the_way(neighbour) == ""


def test_members_that_stay_keep_gpus_and_grant_when_others_move():
    ledger = Ledger(topology())
    before = placed(ledger, "a", 0, 0, 1, gpus=2)
    after = ledger.take(before, assignment(0, 3, 1), 7)
    old, new = list(before.placement.seats()), list(after.seats())
    assert (new[0], new[2]) == (old[0], old[2])
    assert (new[1].node, new[1].part) == ("n3", 7)
    assert ledger.room.free_NR[:, 0].tolist() == [2, 2, 4, 2]


def test_a_move_that_does_not_fit_leaves_the_bookings_as_they_were():
    ledger = Ledger(topology())
    before = placed(ledger, "a", 0)
    placed(ledger, "b", 1)
    with pytest.raises(Occupied):
        ledger.take(before, assignment(1), 1)
    assert ledger.room.free_NR[:, 0].tolist() == [0, 0, 4, 4]


def test_a_grant_asks_for_what_its_members_need_on_each_node():
    ledger = Ledger(topology())
    held = placed(ledger, "a", 0, 0, 1, gpus=2)
    asked = {node: (row.tolist(), mask) for node, (row, mask) in shares(held, 0).items()}
    assert asked == {"n0": ([4, 200, 0], 0b1111), "n1": ([2, 100, 0], 0b0011)}
    assert gpus_on(held, next(held.placement.seats())) == (0, 1, 2, 3)
    assert usage({"a": held})["default"].tolist() == [6, 300, 0]


async def test_claims_outlive_the_scheduler_and_those_on_lost_nodes_are_dropped(keys):
    store = Store(keys)
    store.lease = "1 a:1 a"
    await keys.set(LEADER, store.lease)
    here = topology()
    claim = Claim(job="jobs/b", assignment=assignment(1, 2), after=("jobs/a",), evicting=True, due_at=9.0)
    await Claims(store, here).store([claim, replace(claim, job="jobs/c", evicting=False)])
    again = Claims(store, here)
    await again.load()
    (kept,) = again.current(here)
    assert (kept.job, kept.after, kept.evicting) == ("jobs/b", ("jobs/a",), True)
    assert kept.assignment.nodes["learner"].tolist() == [1, 2]
    smaller = build_topology("c", [node for node in here.nodes if node.name != "n2"])
    lost = Claims(store, smaller)
    await lost.load()
    assert lost.current(smaller) == ()
