"""The state machine alone: no clock, no I/O."""

import pytest
from machine_steps import begin, commit, join, kinds, machine, offer, report

from reflux_weight_broker.plan import Tensors
from reflux_weight_broker.records import Phase, Registration
from reflux_weight_broker.refusals import (
    LayoutMismatch,
    PublisherFenced,
    StaleEpoch,
    UnknownReplica,
    VersionInProgress,
    VersionRegression,
)


def test_a_version_commits_when_everyone_has_prepared() -> None:
    versions = machine("a", "b")
    transaction, actions = begin(versions, 1)
    assert kinds(actions) == [("Persist", ""), ("Prepare", "a"), ("Prepare", "b")]
    assert report(versions, "a", 1, "prepared", bytes=8, transfer_seconds=0.5) == []
    actions = report(versions, "b", 1, "prepared", bytes=8)
    assert kinds(actions) == [("Persist", ""), ("Commit", "a"), ("Commit", "b")]
    assert actions[0].transaction.phase is Phase.COMMITTING
    assert report(versions, "b", 1, "committed") == []
    actions = report(versions, "a", 1, "committed", now=3.0, pause_ms=2.0)
    assert kinds(actions) == [("Persist", "")]
    assert (transaction.phase, transaction.bytes, transaction.prepare_seconds, transaction.commit_seconds) == (
        Phase.COMMITTED, 16, 1.0, 2.0,
    )  # fmt: skip
    assert [(r.epoch, r.version) for r in versions.fleet.replicas.values()] == [(1, 1), (1, 1)]


def test_one_failure_aborts_for_all_and_names_the_reason() -> None:
    versions = machine("a", "b")
    commit(versions, 1)
    transaction, _ = begin(versions, 2)
    report(versions, "a", 2, "prepared")
    actions = report(versions, "b", 2, "failed", error="checksum mismatch in w")
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Abort", "b")]
    assert (transaction.phase, transaction.error) == (Phase.ABORTED, "replica b: checksum mismatch in w")
    assert versions.committed.manifest.version == 1
    assert [r.version for r in versions.fleet.replicas.values()] == [1, 1]
    commit(versions, 2)
    assert versions.committed.epoch == 3


def test_a_silent_replica_aborts_the_version_and_is_dismissed() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    assert versions.tick(9.0) == []
    assert kinds(versions.tick(10.5)) == [("Persist", ""), ("Abort", "a"), ("Abort", "b"), ("Dismiss", "b")]
    assert transaction.error == "b did not prepare within 10 s"
    assert list(versions.fleet.replicas) == ["a"]
    with pytest.raises(UnknownReplica):
        report(versions, "b", 1, "prepared")
    commit(versions, 1)


def test_a_replica_that_died_is_left_behind_after_the_grace() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    versions.fleet.lost("b", "1", 1.0)
    assert versions.tick(2.5) == []
    assert kinds(versions.tick(3.5)) == [("Dismiss", "b"), ("Persist", ""), ("Commit", "a")]
    report(versions, "a", 1, "committed")
    assert transaction.phase is Phase.COMMITTED
    assert "did not come back" in transaction.members["b"].error


def test_a_short_interruption_only_repeats_what_is_owed() -> None:
    versions = machine("a")
    begin(versions, 1)
    versions.fleet.lost("a", "1", 1.0)
    assert kinds(versions.connected("a", "1")) == [("Prepare", "a")]
    assert versions.tick(9.0) == []
    report(versions, "a", 1, "prepared")
    versions.fleet.lost("a", "1", 1.0)
    assert kinds(versions.connected("a", "1")) == [("Commit", "a")]
    report(versions, "a", 1, "committed")
    assert versions.connected("a", "1") == []


def test_a_decided_version_is_committed_without_the_one_that_hangs() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    report(versions, "b", 1, "prepared")
    report(versions, "a", 1, "committed")
    assert kinds(versions.tick(11.5)) == [("Dismiss", "b"), ("Persist", "")]
    assert transaction.phase is Phase.COMMITTED
    assert list(versions.fleet.replicas) == ["a"]


def test_a_failed_swap_dismisses_the_replica_not_the_version() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    report(versions, "b", 1, "prepared")
    assert kinds(report(versions, "b", 1, "failed", error="no memory")) == [("Dismiss", "b")]
    report(versions, "a", 1, "committed")
    assert (transaction.phase, transaction.members["b"].error) == (Phase.COMMITTED, "no memory")


def test_a_late_joiner_gets_the_committed_version_alone() -> None:
    versions = machine("a")
    commit(versions, 1)
    assert kinds(join(versions, "b")) == [("Prepare", "b")]
    assert kinds(report(versions, "b", 1, "prepared")) == [("Commit", "b")]
    assert report(versions, "b", 1, "committed") == []
    assert versions.fleet.replicas["b"].version == 1
    assert join(versions, "c", epoch=1) == []  # came back with the committed version, after a restart of the broker


def test_a_late_joiner_whose_source_is_gone_gets_the_next_version() -> None:
    versions = machine("a")
    commit(versions, 1)
    join(versions, "b")
    assert kinds(report(versions, "b", 1, "failed", error="process 7 has exited")) == []
    assert versions.fleet.replicas["b"].error == "process 7 has exited"
    commit(versions, 2)
    assert versions.fleet.replicas["b"].version == 2


def test_a_joiner_during_prepare_takes_part() -> None:
    versions = machine("a")
    transaction, _ = begin(versions, 1)
    assert kinds(join(versions, "b")) == [("Prepare", "b")]
    report(versions, "a", 1, "prepared")
    assert transaction.phase is Phase.PREPARING
    report(versions, "b", 1, "prepared")
    assert transaction.phase is Phase.COMMITTING
    assert join(versions, "c") == []  # too late for this one
    report(versions, "a", 1, "committed")
    assert kinds(report(versions, "b", 1, "committed")) == [("Persist", ""), ("Prepare", "c")]


def test_a_joiner_of_an_aborted_version_falls_back_to_the_committed_one() -> None:
    versions = machine("a")
    commit(versions, 1)
    begin(versions, 2)
    join(versions, "b")
    actions = report(versions, "a", 2, "failed", error="x")
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Abort", "b"), ("Prepare", "b")]
    assert actions[-1].epoch == 1


def test_missing_replicas_are_waited_for_and_named() -> None:
    versions = machine("a")
    transaction, _ = begin(versions, 1, minimum=2)
    report(versions, "a", 1, "prepared")
    assert transaction.phase is Phase.PREPARING
    versions.tick(10.5)
    assert transaction.error == "1 of at least 2 replicas were there within 10 s"
    assert list(versions.fleet.replicas) == ["a"]
    transaction, _ = begin(versions, 1, minimum=2)
    report(versions, "a", 2, "prepared")
    join(versions, "b")
    report(versions, "b", 2, "prepared")
    assert transaction.phase is Phase.COMMITTING


def test_nobody_there_commits_at_once() -> None:
    versions = machine()
    transaction, actions = begin(versions, 1)
    assert kinds(actions) == [("Persist", ""), ("Persist", ""), ("Persist", "")]
    assert [action.transaction.phase for action in actions] == [Phase.PREPARING, Phase.COMMITTING, Phase.COMMITTED]
    assert transaction.phase is Phase.COMMITTED


def test_of_two_publishers_one_wins() -> None:
    versions = machine("a")
    begin(versions, 1)
    with pytest.raises(VersionInProgress):
        begin(versions, 1, publisher_epoch=0)
    report(versions, "a", 1, "prepared")
    report(versions, "a", 1, "committed")
    with pytest.raises(PublisherFenced):
        begin(versions, 2, publisher_epoch=0)


def test_a_new_publisher_supersedes_what_its_predecessor_left_behind() -> None:
    versions = machine("a")
    first, _ = begin(versions, 1)
    second, actions = begin(versions, 1)
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Persist", ""), ("Prepare", "a")]
    assert (first.phase, first.error) == (Phase.ABORTED, "superseded by epoch 2")
    with pytest.raises(StaleEpoch):
        report(versions, "a", 1, "prepared")
    report(versions, "a", 2, "prepared")
    assert second.phase is Phase.COMMITTING


def test_a_decided_version_is_never_aborted_by_the_next_one() -> None:
    versions = machine("a", "b")
    first, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    report(versions, "b", 1, "prepared")
    report(versions, "a", 1, "committed")
    begin(versions, 2)
    assert first.phase is Phase.COMMITTED
    assert versions.committed.epoch == 1
    with pytest.raises(StaleEpoch):
        report(versions, "b", 1, "committed")
    for outcome in ("prepared", "committed"):
        for name in ("a", "b"):
            report(versions, name, 2, outcome)
    assert [r.version for r in versions.fleet.replicas.values()] == [2, 2]


def test_versions_do_not_go_back_unless_restored() -> None:
    versions = machine("a")
    commit(versions, 5)
    with pytest.raises(VersionRegression):
        begin(versions, 4)
    versions.check_begin(offer(4), versions.last_epoch, replay=True)


def test_other_tensors_are_refused_at_registration_and_at_begin() -> None:
    versions = machine("a")
    commit(versions, 1)
    other = Tensors("h3", 1, {"v": ((2,), "float32")})
    with pytest.raises(LayoutMismatch, match="missing w"):
        versions.register(Registration("b", "1", other), 0.0)
    assert "b" not in versions.fleet.replicas
    with pytest.raises(LayoutMismatch, match=r"replica a.*unexpected w"):
        versions.check_begin(offer(2, other), versions.last_epoch, replay=False)


def test_a_new_process_of_a_replica_replaces_the_old_one() -> None:
    versions = machine("a")
    transaction, _ = begin(versions, 1)
    actions = join(versions, "a", incarnation="2")
    assert kinds(actions)[0] == ("Dismiss", "a")
    assert versions.fleet.replicas["a"].seats[0].incarnation == "2"
    assert transaction.phase is Phase.COMMITTED or kinds(actions)[-1] == ("Prepare", "a")
    versions.fleet.lost("a", "1", 0.0)  # the old stream's end changes nothing
    assert versions.fleet.replicas["a"].seats[0].lost_at is None


def test_repeated_and_early_acknowledgements() -> None:
    versions = machine("a", "b")
    begin(versions, 1)
    report(versions, "a", 1, "prepared", bytes=8)
    report(versions, "a", 1, "prepared", bytes=8)
    assert versions.current.bytes == 8
    with pytest.raises(StaleEpoch, match="before it was asked"):
        report(versions, "a", 1, "committed")
    report(versions, "b", 1, "prepared")
    report(versions, "a", 1, "committed")
    assert report(versions, "a", 1, "committed") == []
    with pytest.raises(StaleEpoch):
        report(versions, "a", 9, "prepared")
