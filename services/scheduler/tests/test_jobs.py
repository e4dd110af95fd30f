"""The job state machine against random histories of agents, and its rules one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from reflux_placement.topology import Resources
from reflux_scheduler import jobs, restarts, sightings
from reflux_scheduler.job import Heard, Job, Part, Placement, Report, RolePlaces, Seat
from reflux_scheduler.spec import JobSpec, RoleTemplate

ORDER = ("PENDING", "PLACED", "STARTING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
CPU = Resources(millicpus=100)


def places(*roles: RoleTemplate, node: str = "n1", part: int = 0) -> Placement:
    columns = [RolePlaces(role.name, (node,) * role.count, (0,) * role.count, (part,) * role.count) for role in roles]
    return Placement("node", f"c/b/r/{node}", tuple(columns))


def queued(*roles: RoleTemplate) -> Job:
    roles = roles or (RoleTemplate("learner", 1, CPU, ("x",)), RoleTemplate("engine", 2, CPU, ("x",), max_restarts=1))
    return Job("j", 1, JobSpec("test", roles), created_at=0.0)


def started(*roles: RoleTemplate) -> Job:
    job = queued(*roles)
    return jobs.starting(jobs.placed(job, places(*job.spec.roles), 1.0), 2.0)


def seats(job: Job) -> dict[str, Seat]:
    return {seat.label: seat for seat in job.placement.seats()} if job.placement else {}


def reports(job: Job, state: str, revision: int = 1, **fields) -> dict[str, Report]:
    ids = [job.role_id(seat) for seat in seats(job).values()]
    return {role_id: Report(role_id, state, pid=100, revision=revision, **fields) for role_id in ids}


def observe(job: Job, incarnation: str, told: dict[str, Report], now: float, node: str = "n1", grant: str = "") -> Job:
    return sightings.observe(job, {(node, grant): Heard(incarnation, told)}, now)


def states(job: Job) -> dict[str, str]:
    return {label: job.status(seat).state for label, seat in seats(job).items()}


def restart_counts(job: Job) -> list[int]:
    return [job.status(seat).restarts for seat in jobs.to_start(job)]


def running(*roles: RoleTemplate) -> Job:
    job = started(*roles)
    return observe(job, "a", reports(job, "running"), 3.0)


def test_all_members_running_makes_the_job_run():
    job = running()
    assert job.state == "RUNNING"
    assert [event.kind for event in job.events] == ["state", "state", "started", "started", "started", "state"]


def test_one_member_that_is_missing_keeps_it_starting():
    job = started()
    some = reports(job, "running")
    del some["j/engine/1"]
    job = observe(job, "a", some, 3.0)
    assert job.state == "STARTING"
    assert [seat.label for seat in jobs.to_start(job)] == ["engine/1"]


def test_a_report_of_the_same_agent_that_lacks_a_member_is_older_than_its_start():
    job = running()
    assert observe(job, "a", {}, 4.0) == job


def test_a_late_report_is_ignored():
    job = running()
    job = observe(job, "a", reports(job, "restarting", revision=3), 4.0)
    assert observe(job, "a", reports(job, "running", revision=2), 5.0) == job


def test_members_of_a_replaced_agent_start_anew_or_fail_by_their_bound():
    engines = RoleTemplate("engine", 2, CPU, ("x",), max_restarts=1)
    job = observe(running(engines), "b", {}, 4.0)
    assert job.state == "RUNNING"
    assert restart_counts(job) == [1, 1]
    job = observe(job, "b", reports(job, "running", restarts=0), 5.0)
    assert [job.status(seat).restarts for seat in seats(job).values()] == [1, 1]
    job = observe(job, "c", {}, 6.0)
    assert job.state == "FAILED"
    assert "engine/0 was lost (its agent was replaced) after 1 losses" in job.message


def test_a_member_without_restarts_fails_the_job_when_its_agent_is_replaced():
    job = observe(running(RoleTemplate("learner", 1, CPU, ("x",))), "b", {}, 4.0)
    assert (job.state, job.message) == (
        "FAILED",
        "learner/0 was lost (its agent was replaced) and no restart is allowed",
    )


def test_a_failed_member_ends_the_gang_once_the_others_are_stopped():
    job = running()
    some = reports(job, "running") | {"j/learner/0": Report("j/learner/0", "failed", revision=2, message="died")}
    job = observe(job, "a", some, 4.0)
    assert (job.state, job.message) == ("RUNNING", "stopping: learner/0 died")
    assert [seat.label for seat in jobs.to_stop(job)] == ["engine/0", "engine/1"]
    assert jobs.to_start(job) == ()
    for label in ("engine/0", "engine/1"):
        job = sightings.stopped_member(job, seats(job)[label], 5.0)
    assert (job.state, job.message, job.ended_at) == ("FAILED", "learner/0 died", 5.0)


def test_a_cancel_before_the_start_needs_no_stop():
    job = queued()
    assert jobs.end(job, "CANCELLED", "enough", 1.0).state == "CANCELLED"


def test_the_first_cause_stays():
    job = jobs.end(running(), "FAILED", "first", 4.0)
    assert jobs.end(job, "CANCELLED", "second", 5.0) is job


def test_a_lost_node_leaves_its_members_lost_and_the_job_to_the_policy():
    job = sightings.node_lost(running(), "n1", "", "gone", 4.0)
    assert (job.state, job.ending) == ("RUNNING", None)
    assert set(states(job).values()) == {"lost"}
    assert jobs.to_start(job) == ()
    assert jobs.end(job, "FAILED", "gone", 5.0).state == "FAILED"


def test_a_lost_member_whose_agent_comes_back_starts_again():
    engines = RoleTemplate("engine", 1, CPU, ("x",), max_restarts=2)
    job = sightings.node_lost(running(engines), "n1", "", "gone", 4.0)
    job = observe(job, "b", {}, 5.0)
    assert states(job) == {"engine/0": "waiting"}


def test_a_requeued_job_stops_its_members_first_and_then_waits_with_its_history():
    job = jobs.requeue(running(), "node gone", 4.0)
    assert (job.state, job.requeues, len(jobs.to_stop(job))) == ("RUNNING", 1, 3)
    assert jobs.to_start(job) == ()
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    assert (job.state, job.placement, job.ending, job.queued_at) == ("PENDING", None, None, 5.0)
    assert job.message == "queued again: node gone"
    job = jobs.placed(job, places(*job.spec.roles, node="n2"), 6.0)
    assert job.attempt == 2
    job = observe(jobs.starting(job, 7.0), "b", reports(job, "running", attempt=2), 8.0, node="n2")
    assert job.state == "RUNNING"
    assert [job.status(seat).restarts for seat in seats(job).values()] == [1, 1, 1]


def test_a_report_of_an_earlier_attempt_is_not_taken_for_the_present_one():
    job = jobs.requeue(running(), "node gone", 4.0)
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    job = jobs.starting(jobs.placed(job, places(*job.spec.roles), 6.0), 7.0)
    job = observe(job, "a", reports(job, "succeeded", revision=9, attempt=1), 8.0)
    assert set(states(job).values()) == {"waiting"}


def test_a_preempted_job_is_counted_and_a_cancel_ends_it_for_good():
    job = jobs.requeue(running(), "for another", 4.0, preempted_by="jobs/b")
    assert (job.preemptions, job.preempted_by) == (1, "jobs/b")
    job = jobs.end(job, "CANCELLED", "enough", 5.0)
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 6.0)
    assert job.state == "CANCELLED"


def test_a_migrated_job_goes_to_its_next_place_without_waiting():
    job = running()
    there = places(*job.spec.roles, node="n2")
    job = jobs.requeue(job, "makes room", 4.0, then=there)
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    assert (job.state, job.placement, job.attempt) == ("PLACED", there, 2)


def test_a_replaced_member_starts_elsewhere_and_the_others_run_on():
    job = running()
    job = sightings.node_lost(job, "n1", "", "gone", 4.0)
    job = observe(job, "a", {}, 4.0)  # nothing new
    roles = tuple(
        replace(each, nodes=("n2",) * len(each.nodes)) if each.role == "engine" else each
        for each in job.placement.roles
    )
    job = jobs.moved(job, replace(job.placement, roles=roles), "replaced", "node gone", 5.0)
    assert [seat.node for seat in jobs.to_start(job)] == ["n2", "n2"]
    assert job.retiring == ()


def test_a_member_that_leaves_a_draining_node_is_stopped_before_it_starts_elsewhere():
    job = running()
    old = seats(job)["engine/1"]
    roles = tuple(replace(each, nodes=("n1", "n2")) if each.role == "engine" else each for each in job.placement.roles)
    job = jobs.moved(job, replace(job.placement, roles=roles), "replaced", "drain", 5.0)
    assert jobs.to_stop(job) == (old,)
    assert jobs.to_start(job) == ()
    job = jobs.retired(job, old)
    assert [(seat.label, seat.node) for seat in jobs.to_start(job)] == [("engine/1", "n2")]


def test_a_job_keeps_its_end_until_its_grants_are_given_back():
    job = replace(running(), parts=(Part(0, "granted"),), next_part=1)
    job = jobs.end(job, "CANCELLED", "enough", 4.0)
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    assert job.state == "RUNNING"
    assert jobs.released(job, 0, 6.0).state == "CANCELLED"


def test_a_job_that_migrates_asks_for_the_room_of_its_next_place_once_the_old_one_is_given_back():
    job = replace(running(), parts=(Part(0, "granted"),), next_part=1)
    there = places(*job.spec.roles, node="n2", part=1)
    job = jobs.requeue(replace(job, next_part=2), "migrates", 4.0, then=there)
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    assert (job.state, job.parts) == ("RUNNING", (Part(0, "granted"),))
    job = jobs.released(job, 0, 6.0)
    assert (job.state, job.placement, job.parts) == ("PLACED", there, (Part(1),))
    # Where nodes have their own agents nothing is asked for.
    job = jobs.requeue(running(), "migrates", 4.0, then=places(*queued().spec.roles, node="n2"))
    for seat in seats(job).values():
        job = sightings.stopped_member(job, seat, 5.0)
    assert (job.state, job.parts) == ("PLACED", ())


def test_serving_roles_do_not_hold_a_job_open():
    job = running(RoleTemplate("learner", 1, CPU, ("x",)), RoleTemplate("engine", 1, CPU, ("x",), serves=True))
    some = reports(job, "running") | {"j/learner/0": Report("j/learner/0", "succeeded", revision=2)}
    job = observe(job, "a", some, 4.0)
    assert [seat.label for seat in jobs.to_stop(job)] == ["engine/0"]
    job = observe(job, "a", {"j/engine/0": Report("j/engine/0", "stopped", revision=3)}, 5.0)
    assert job.state == "SUCCEEDED"


def test_a_job_survives_its_encoding():
    job = observe(running(), "a", reports(running(), "restarting", revision=2, exit_code=-9), 4.0)
    codec = TypeAdapter(Job)
    assert codec.validate_json(codec.dump_json(job)) == job


actions = st.one_of(
    st.tuples(
        st.just("observe"),
        st.sampled_from("abc"),
        st.dictionaries(
            st.sampled_from(["j/learner/0", "j/engine/0", "j/engine/1"]),
            st.tuples(st.sampled_from(["running", "restarting", "succeeded", "failed", "stopped"]), st.integers(0, 9)),
        ),
    ),
    st.tuples(st.just("cancel"), st.none(), st.none()),
    st.tuples(st.just("lost"), st.none(), st.none()),
    st.tuples(st.just("requeue"), st.none(), st.none()),
    st.tuples(st.just("stopped"), st.none(), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=12))
def test_states_only_move_forward_and_a_final_job_never_changes(history):
    job = started()
    for now, (kind, incarnation, seen) in enumerate(history, start=3):
        before = job
        if kind == "observe":
            told = {
                role_id: Report(role_id, state, pid=revision, revision=revision)
                for role_id, (state, revision) in seen.items()
            }
            job = observe(job, incarnation, told, float(now))
        elif kind == "cancel":
            job = jobs.end(job, "CANCELLED", "on request", float(now))
        elif kind == "lost":
            job = sightings.node_lost(job, "n1", "", "gone", float(now))
        elif kind == "requeue":
            job = jobs.requeue(job, "elsewhere", float(now))
        elif job.placement is not None:
            job = sightings.stopped_member(job, seats(job)["engine/0"], float(now))
        forward = ORDER.index(job.state) >= ORDER.index(before.state)
        back = job.state == "PENDING" and (before.ending is not None or kind == "requeue")
        assert forward or back
        assert job.sequence >= before.sequence
        assert not (jobs.to_start(job) and jobs.to_stop(job))
        if before.final:
            assert job == before
        if job.final and job.placement is not None:
            assert set(states(job).values()) <= {"succeeded", "failed", "stopped", "lost"}
            assert not jobs.to_stop(job)


def test_restarts_are_bounded_within_the_window_and_paused_longer_each_time():
    assert restarts.judge(0, (), 0.0, 0).action == "succeeded"
    assert restarts.judge(1, (), 0.0, 0) == restarts.Verdict(
        "failed", cause="ended with status 1; no restart is allowed"
    )
    pauses = [restarts.judge(-9, tuple(range(count)), 10.0, 9).pause_seconds for count in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.2)
    assert pauses[-1] == 10.0
    assert restarts.judge(1, (0.0, 1.0), 10.0, 2).action == "failed"
    assert restarts.judge(1, (0.0, 1.0), 600.5, 2).action == "restart"


def test_waiting_messages_move_the_sequence_only_when_they_change():
    job = queued()
    once = jobs.waiting(job, "for GPUs")
    assert once.sequence == 1
    assert jobs.waiting(once, "for GPUs") is once
    assert replace(once, message="").message == ""
