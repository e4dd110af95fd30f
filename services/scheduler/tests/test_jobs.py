"""The job state machine against random histories of agents, and its rules one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from reflux_scheduler import jobs, restarts
from reflux_scheduler.gang import Member, Placement
from reflux_scheduler.job import Job, JobSpec, Report, RoleTemplate
from reflux_scheduler.topology import Resources

ORDER = ("PENDING", "PLACED", "STARTING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
CPU = Resources(millicpus=100)


def started(*roles: RoleTemplate) -> Job:
    roles = roles or (RoleTemplate("learner", 1, CPU, ("x",)), RoleTemplate("engine", 2, CPU, ("x",), max_restarts=1))
    job = Job("j", 1, JobSpec("test", roles), created_at=0.0)
    members = tuple(Member(role.name, rank, "n1", role.each) for role in roles for rank in range(role.count))
    return jobs.starting(jobs.placed(job, Placement("node", ("c", "b", "r", "n1"), members), 1.0), 2.0)


def reports(job: Job, state: str, revision: int = 1, **fields) -> dict[str, Report]:
    ids = [job.role_id(member) for member in job.members]
    return {role_id: Report(role_id, state, pid=100, revision=revision, **fields) for role_id in ids}


def running(*roles: RoleTemplate) -> Job:
    job = started(*roles)
    return jobs.observe(job, "n1", "a", reports(job, "running"), 3.0)


def test_all_members_running_makes_the_job_run():
    job = running()
    assert job.state == "RUNNING"
    assert [event.kind for event in job.events] == ["state", "state", "started", "started", "started", "state"]


def test_one_member_that_is_missing_keeps_it_starting():
    job = started()
    some = reports(job, "running")
    del some["j/engine/1"]
    job = jobs.observe(job, "n1", "a", some, 3.0)
    assert job.state == "STARTING"
    assert [member.label for member in jobs.to_start(job)] == ["engine/1"]


def test_a_report_of_the_same_agent_that_lacks_a_member_is_older_than_its_start():
    job = running()
    assert jobs.observe(job, "n1", "a", {}, 4.0) == job


def test_a_late_report_is_ignored():
    job = running()
    job = jobs.observe(job, "n1", "a", reports(job, "restarting", revision=3), 4.0)
    assert jobs.observe(job, "n1", "a", reports(job, "running", revision=2), 5.0) == job


def test_members_of_a_replaced_agent_start_anew_or_fail_by_their_bound():
    engines = RoleTemplate("engine", 2, CPU, ("x",), max_restarts=1)
    job = jobs.observe(running(engines), "n1", "b", {}, 4.0)
    assert job.state == "RUNNING"
    assert [member.restarts for member in jobs.to_start(job)] == [1, 1]
    job = jobs.observe(job, "n1", "b", reports(job, "running", restarts=0), 5.0)
    assert [member.restarts for member in job.members] == [1, 1]
    job = jobs.observe(job, "n1", "c", {}, 6.0)
    assert job.state == "FAILED"
    assert "engine/0 was lost (its agent was replaced) after 1 losses" in job.message


def test_a_member_without_restarts_fails_the_job_when_its_agent_is_replaced():
    job = jobs.observe(running(RoleTemplate("learner", 1, CPU, ("x",))), "n1", "b", {}, 4.0)
    assert (job.state, job.message) == (
        "FAILED",
        "learner/0 was lost (its agent was replaced) and no restart is allowed",
    )


def test_a_failed_member_ends_the_gang_once_the_others_are_stopped():
    job = running()
    some = reports(job, "running") | {"j/learner/0": Report("j/learner/0", "failed", revision=2, message="died")}
    job = jobs.observe(job, "n1", "a", some, 4.0)
    assert (job.state, job.message) == ("RUNNING", "stopping: learner/0 died")
    assert [member.label for member in jobs.to_stop(job)] == ["engine/0", "engine/1"]
    assert jobs.to_start(job) == ()
    for role_id in ("j/engine/0", "j/engine/1"):
        job = jobs.stopped_member(job, role_id, 5.0)
    assert (job.state, job.message, job.ended_at) == ("FAILED", "learner/0 died", 5.0)


def test_a_cancel_before_the_start_needs_no_stop():
    job = Job("j", 1, JobSpec("test", (RoleTemplate("a", 1, CPU, ("x",)),)), created_at=0.0)
    assert jobs.end(job, "CANCELLED", "enough", 1.0).state == "CANCELLED"


def test_the_first_cause_stays():
    job = jobs.end(running(), "FAILED", "first", 4.0)
    assert jobs.end(job, "CANCELLED", "second", 5.0) is job


def test_a_lost_node_counts_its_members_as_stopped():
    job = jobs.node_lost(running(), "n1", "gone", 4.0)
    assert (job.state, job.message) == ("FAILED", "gone")


def test_serving_roles_do_not_hold_a_job_open():
    job = running(RoleTemplate("learner", 1, CPU, ("x",)), RoleTemplate("engine", 1, CPU, ("x",), serves=True))
    some = reports(job, "running") | {"j/learner/0": Report("j/learner/0", "succeeded", revision=2)}
    job = jobs.observe(job, "n1", "a", some, 4.0)
    assert [member.label for member in jobs.to_stop(job)] == ["engine/0"]
    job = jobs.observe(job, "n1", "a", {"j/engine/0": Report("j/engine/0", "stopped", revision=3)}, 5.0)
    assert job.state == "SUCCEEDED"


def test_a_job_survives_its_encoding():
    job = jobs.observe(running(), "n1", "a", reports(running(), "restarting", revision=2, exit_code=-9), 4.0)
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
            job = jobs.observe(job, "n1", incarnation, told, float(now))
        elif kind == "cancel":
            job = jobs.end(job, "CANCELLED", "on request", float(now))
        elif kind == "lost":
            job = jobs.node_lost(job, "n1", "gone", float(now))
        else:
            job = jobs.stopped_member(job, "j/engine/0", float(now))
        assert ORDER.index(job.state) >= ORDER.index(before.state)
        assert job.sequence >= before.sequence
        assert not (jobs.to_start(job) and jobs.to_stop(job))
        if before.final:
            assert job == before
        if job.final:
            assert all(member.state in ("succeeded", "failed", "stopped") for member in job.members)
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
    job = Job("j", 1, JobSpec("test", (RoleTemplate("a", 1, CPU, ("x",)),)), created_at=0.0)
    once = jobs.waiting(job, "for GPUs")
    assert once.sequence == 1
    assert jobs.waiting(once, "for GPUs") is once
    assert replace(once, message="").message == ""
