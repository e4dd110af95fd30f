import itertools
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_placement.gang import Assignment, GangDemand, RoleDemand
from reflux_placement.place.misfit import Misfit
from reflux_placement.place.rules.slurm import slurm_block
from reflux_placement.policy.view import Decision, Preempt, Start
from reflux_placement.room import Room
from reflux_placement.simulate.block_screen import block_screen
from reflux_placement.simulate.clusters import ListedNode, grid, racked
from reflux_placement.simulate.engine import PolicyViolation, simulate
from reflux_placement.simulate.fragmentation import slots
from reflux_placement.simulate.jobs import Fault, Options, SimJob
from reflux_placement.simulate.policies import POLICIES
from reflux_placement.simulate.rl_mix import rl_workload
from reflux_placement.topology import Resources

GPU = Resources(1, 1_000, 1 << 30)
SMALL = grid("small", racks=2, nodes_per_rack=1, each=GPU.times(4))


def job(name, arrives_at, seconds, members, *, each=4, **more):
    role = RoleDemand(role="worker", count=members, each=GPU.times(each))
    return SimJob(name=name, gang=GangDemand(roles=(role,)), arrives_at=arrives_at, seconds=seconds, **more)


def fifo():
    return POLICIES["fifo-first-fit"]()


def times(history):
    return {r.job.name: [(stay.start, stay.end) for stay in r.stays] for r in history.records}


def test_backfill_goes_first_only_if_the_reserved_job_keeps_its_time():
    jobs = [job("a", 0, 100, 1), job("wide", 1, 50, 2), job("short", 2, 90, 1), job("long", 3, 120, 1)]
    history = simulate(SMALL, jobs, fifo())
    assert times(history) == {"a": [(0, 100)], "wide": [(100, 150)], "short": [(2, 92)], "long": [(150, 270)]}


@pytest.mark.parametrize("policy", ["reflux", "fifo-first-fit"])
def test_jobs_that_arrive_and_end_at_one_moment_are_decided_in_one_cycle(policy):
    jobs = [job("a", 0, 10, 2), job("b", 10, 10, 2), job("c", 20, 10, 2)]
    history = simulate(SMALL, jobs, POLICIES[policy]())
    assert times(history) == {"a": [(0, 10)], "b": [(10, 20)], "c": [(20, 30)]}
    assert history.cycles == 3


def fifo_easy_by_the_clock(jobs, gpus):
    """Starts by an independent reference: one node, time in steps of a second, EASY on plain counts of GPUs."""
    waiting, running, starts = sorted(jobs, key=lambda each: (each.arrives_at, each.name)), {}, {}
    now = 0
    while waiting or running:
        running = {name: end for name, end in running.items() if end > now}
        need = {each.name: each.gpus for each in jobs}
        free = gpus - sum(need[name] for name in running)
        here = [each for each in waiting if each.arrives_at <= now]
        while here and here[0].gpus <= free:
            first = here.pop(0)
            free -= first.gpus
            running[first.name], starts[first.name] = now + first.seconds, now
        if here:
            shadow, spare = now, free
            for name, end in sorted(running.items(), key=lambda each: each[1]):
                if spare >= here[0].gpus:
                    break
                shadow, spare = end, spare + need[name]
            spare = free + sum(need[name] for name, end in running.items() if end <= shadow) - here[0].gpus
            for each in here[1:]:
                early = now + each.seconds <= shadow
                if each.gpus <= free and (early or each.gpus <= spare):
                    free -= each.gpus
                    spare -= 0 if early else each.gpus
                    running[each.name], starts[each.name] = now + each.seconds, now
        waiting = [each for each in waiting if each.name not in starts]
        now += 1
    return starts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 15), st.integers(1, 4)), min_size=1, max_size=9))
def test_on_one_node_the_peers_queueing_equals_a_reference_that_steps_through_seconds(rows):
    node = grid("one", racks=1, nodes_per_rack=1, each=GPU.times(4))
    rows = sorted(rows, key=lambda row: row[0])
    jobs = [job(f"j{at:02d}", start, seconds, 1, each=gpus) for at, (start, seconds, gpus) in enumerate(rows)]
    history = simulate(node, jobs, fifo())
    assert {r.job.name: r.started_at for r in history.records} == fifo_easy_by_the_clock(jobs, 4)


def overlaps(history):
    """Pairs of stays that hold one GPU at one time."""
    held = defaultdict(list)
    for record in history.records:
        for stay in record.stays:
            for node, mask in zip(stay.node_M.tolist(), stay.gpus_M.tolist(), strict=True):
                for gpu in range(mask.bit_length()):
                    if mask >> gpu & 1:
                        held[node, gpu].append((stay.start, stay.end, record.job.name))
    found = []
    for spans in held.values():
        spans.sort()
        found += [(a, b) for a, b in itertools.pairwise(spans) if b[0] < a[1]]
    return found


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_job_runs_once_to_its_end_and_no_gpu_is_held_twice(policy):
    topology = grid("four", racks=4, nodes_per_rack=6, racks_per_block=2)
    jobs = fitting(rl_workload(topology, jobs=60, load=0.9, seed=3).jobs, topology)
    history = simulate(topology, jobs, POLICIES[policy]())
    assert not history.unfinished
    assert not overlaps(history)
    for record in history.records:
        assert record.started_at >= record.job.arrives_at
        assert [stay.ended_by for stay in record.stays][-1] == "done"
        if len(record.stays) == 1 and record.stays[0].gpus == record.job.gpus:
            assert record.ended_at - record.started_at == pytest.approx(record.job.seconds)


def busy(count, seed):
    """Gangs of 1 to 12 trays that keep 24 trays busy and others waiting."""
    rng = np.random.default_rng(seed)
    rows = zip(
        np.cumsum(rng.exponential(250, count)), rng.integers(200, 4000, count), rng.integers(1, 13, count), strict=True
    )
    return [job(f"j{at}", float(a), float(s), int(n), checkpoint_seconds=600) for at, (a, s, n) in enumerate(rows)]


def fitting(jobs, topology):
    return [each for each in jobs if each.gpus <= topology.capacity_NR[:, 0].sum() / 3]


@pytest.mark.parametrize("policy", ["reflux", "fifo-first-fit"])
def test_nodes_that_fail_cost_work_but_every_job_still_ends(policy):
    topology = grid("four", racks=4, nodes_per_rack=6, racks_per_block=2)
    jobs = busy(40, seed=5)
    rng = np.random.default_rng(0)
    faults = [Fault(float(at), int(rng.integers(24)), 1_500.0) for at in np.arange(1, 25) * 600.0]
    history = simulate(topology, jobs, POLICIES[policy](), faults=faults, options=Options(restart_seconds=30))
    assert not history.unfinished
    assert not overlaps(history)
    assert sum(record.failures for record in history.records)
    assert sum(record.lost_gpu_seconds for record in history.records) > 0


def test_equal_arguments_give_an_equal_history():
    topology = grid("four", racks=4, nodes_per_rack=6, racks_per_block=2)
    runs = []
    for seed in (1, 1, 2):
        history = simulate(topology, busy(25, seed), POLICIES["reflux"]())
        runs.append(
            [(r.job.name, r.ended_at, [tuple(stay.node_M.tolist()) for stay in r.stays]) for r in history.records]
        )
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def at_node(members, node=0):
    return Assignment("node", node, {"worker": np.full(members, node)})


def test_a_preempted_job_loses_the_work_behind_its_last_checkpoint():
    def policy(view):
        asks = {ask.job for ask in view.pending}
        if view.now == 250:
            return Decision((Preempt(("a",), "b", 0.0, "test"), Start("b", at_node(1), "test")), {})
        if view.now in (0, 260):
            return Decision(tuple(Start(name, at_node(1), "test") for name in asks), {})
        return Decision((), {})

    jobs = [job("a", 0, 400, 1, checkpoint_seconds=100), job("b", 250, 10, 1)]
    first = simulate(SMALL, jobs, policy, options=Options(restart_seconds=5)).records[0]
    assert [(stay.start, stay.end, stay.ended_by) for stay in first.stays] == [
        (0, 250, "preempted"),
        (260, 260 + 5 + 200, "done"),
    ]
    assert first.lost_gpu_seconds == 50 * 4
    assert first.preemptions == 1


def test_a_job_on_a_node_that_dies_starts_again_from_its_checkpoint():
    jobs = [job("a", 0, 400, 2, checkpoint_seconds=100)]
    record = simulate(SMALL, jobs, fifo(), faults=[Fault(130, 1, 20)]).records[0]
    assert [(stay.start, stay.end, stay.ended_by) for stay in record.stays] == [(0, 130, "failed"), (150, 450, "done")]
    assert record.lost_gpu_seconds == 30 * 8


def test_traffic_between_racks_makes_a_gang_slower_when_the_world_says_so():
    history = simulate(SMALL, [job("a", 0, 100, 2)], fifo(), options=Options(cross_rack_slowdown=0.5))
    assert history.records[0].stays[0].cross_rack == 1.0
    assert history.records[0].ended_at == 150


@pytest.mark.parametrize(
    ("assignment", "what"),
    [(at_node(1), "part of a gang"), (at_node(2), "too little free"), (at_node(0), "part of a gang")],
)
def test_a_policy_that_does_what_must_never_happen_is_found_out(assignment, what):
    def policy(view):
        return Decision(tuple(Start(ask.job, assignment, "test") for ask in view.pending), {})

    with pytest.raises(PolicyViolation, match=what):
        simulate(SMALL, [job("a", 0, 10, 2)], policy)


def test_a_start_on_a_node_that_is_away_is_found_out():
    def policy(view):
        return Decision(tuple(Start(ask.job, at_node(1), "test") for ask in view.pending), {})

    with pytest.raises(PolicyViolation, match="away"):
        simulate(SMALL, [job("a", 5, 10, 1)], policy, faults=[Fault(1, 0, 100)])


def test_a_job_that_no_policy_starts_is_told_as_unfinished():
    history = simulate(SMALL, [job("a", 0, 10, 3), job("b", 0, 10, 1)], fifo())
    assert [record.job.name for record in history.unfinished] == ["a"]


def test_users_who_say_too_little_delay_a_reservation_and_break_nothing():
    jobs = [replace(job("a", 0, 100, 1), estimate_seconds=10.0), job("wide", 1, 50, 2), job("b", 2, 60, 1)]
    assert times(simulate(SMALL, jobs, fifo())) == {"a": [(0, 100)], "wide": [(100, 150)], "b": [(150, 210)]}


def test_a_gang_from_another_process_is_found_under_its_equal():
    program = (
        "import pickle, sys; from reflux_placement.gang import GangDemand, RoleDemand; "
        "from reflux_placement.topology import Resources; "
        "role = RoleDemand(role='w', count=2, each=Resources(1, 2, 3)); "
        "sys.stdout.buffer.write(pickle.dumps(GangDemand(roles=(role,), preferred_level='rack')))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True
    )
    role = RoleDemand(role="w", count=2, each=Resources(1, 2, 3))
    assert pickle.loads(made.stdout) in {GangDemand(roles=(role,), preferred_level="rack")}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 4), st.booleans())
def test_what_the_screen_refuses_the_block_rule_refuses_too(seed, count, gpus, prefers):
    rng = np.random.default_rng(seed)
    sizes = [ListedNode(f"n{at}", f"m{at % 3}", GPU.times((1, 2, 4)[at % 3])) for at in range(60)]
    topology = racked("mixed", sizes, nodes_per_rack=4, racks_per_block=3)
    room = Room(topology)
    room.free_NR = np.minimum(room.free_NR, rng.integers(0, 5, (60, 1)) * np.array(GPU.row))
    role = RoleDemand(role="worker", count=count, each=GPU.times(gpus))
    gang = GangDemand(roles=(role,), preferred_level="rack" if prefers else "")
    check = block_screen(topology, slots(room.usable_NR(), role.each))
    assert check is not None
    if isinstance(slurm_block(room, gang), Assignment):
        assert check(count)


def test_the_screen_refuses_what_no_aggregated_block_holds():
    topology = racked("even", [ListedNode(f"n{at}", "m", GPU) for at in range(24)], nodes_per_rack=4, racks_per_block=2)
    room = Room(topology)
    room.free_NR[1::2] = 0
    role = RoleDemand(role="worker", count=5, each=GPU)
    check = block_screen(topology, slots(room.usable_NR(), role.each))
    assert check is not None
    assert check(2)
    assert not check(5), "a block of two racks has four free nodes, though the cluster has twelve"
    assert isinstance(slurm_block(room, GangDemand(roles=(role,))), Misfit)
