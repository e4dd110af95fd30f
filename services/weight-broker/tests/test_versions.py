"""The state machine alone: no clock, no I/O."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reflux_transfer.layout import Layout
from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import Abort, Commit, Dismiss, Persist, Phase, Prepare, Replica, Report
from reflux_weight_broker.refusals import (
    LayoutMismatch,
    PublisherFenced,
    StaleEpoch,
    UnknownReplica,
    VersionInProgress,
    VersionRegression,
)
from reflux_weight_broker.versions import ModelVersions

LAYOUT = Layout.from_shapes({"w": ([2], "float32")})


def offer(version: int, layout: Layout = LAYOUT) -> Manifest:
    return Manifest("m", version, layout, (7,), 100, b"handle", "shm", f"request-{version}")


def machine(*names: str) -> ModelVersions:
    versions = ModelVersions("m", reconnect_seconds=2.0)
    for name in names:
        join(versions, name)
    return versions


def join(versions: ModelVersions, name: str, incarnation: str = "1", now: float = 0.0, epoch: int = 0) -> list:
    actions = versions.register(Replica(name, incarnation, LAYOUT, epoch, epoch), now)
    return actions + versions.connected(name, incarnation)


def begin(
    versions: ModelVersions, version: int, now: float = 0.0, minimum: int = 0, publisher_epoch: int | None = None
):
    known = versions.last_epoch if publisher_epoch is None else publisher_epoch
    versions.check_begin(offer(version), known, replay=False)
    epoch = versions.last_epoch + 1
    return versions.begin(offer(version), epoch, timeout_seconds=10.0, min_replicas=minimum, now=now)


def report(versions: ModelVersions, name: str, epoch: int, outcome: str, now: float = 1.0, **fields) -> list:
    return versions.report(Report(name, "1", epoch, outcome, **fields), now)


def kinds(actions: list) -> list:
    return [(type(action).__name__, getattr(action, "replica", "")) for action in actions]


def commit(versions: ModelVersions, version: int) -> None:
    transaction, _ = begin(versions, version)
    for name in list(versions.replicas):
        report(versions, name, transaction.epoch, "prepared")
    for name in list(versions.replicas):
        report(versions, name, transaction.epoch, "committed")
    assert transaction.phase is Phase.COMMITTED


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
    assert [(r.epoch, r.version) for r in versions.replicas.values()] == [(1, 1), (1, 1)]


def test_one_failure_aborts_for_all_and_names_the_reason() -> None:
    versions = machine("a", "b")
    commit(versions, 1)
    transaction, _ = begin(versions, 2)
    report(versions, "a", 2, "prepared")
    actions = report(versions, "b", 2, "failed", error="checksum mismatch in w")
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Abort", "b")]
    assert (transaction.phase, transaction.error) == (Phase.ABORTED, "replica b: checksum mismatch in w")
    assert versions.committed.manifest.version == 1
    assert [r.version for r in versions.replicas.values()] == [1, 1]
    commit(versions, 2)
    assert versions.committed.epoch == 3


def test_a_silent_replica_aborts_the_version_and_is_dismissed() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    assert versions.tick(9.0) == []
    assert kinds(versions.tick(10.5)) == [("Persist", ""), ("Abort", "a"), ("Abort", "b"), ("Dismiss", "b")]
    assert transaction.error == "b did not prepare within 10 s"
    assert list(versions.replicas) == ["a"]
    with pytest.raises(UnknownReplica):
        report(versions, "b", 1, "prepared")
    commit(versions, 1)


def test_a_replica_that_died_is_left_behind_after_the_grace() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared")
    versions.disconnected("b", "1", 1.0)
    assert versions.tick(2.5) == []
    assert kinds(versions.tick(3.5)) == [("Dismiss", "b"), ("Persist", ""), ("Commit", "a")]
    report(versions, "a", 1, "committed")
    assert transaction.phase is Phase.COMMITTED
    assert "did not come back" in transaction.members["b"].error


def test_a_short_interruption_only_repeats_what_is_owed() -> None:
    versions = machine("a")
    begin(versions, 1)
    versions.disconnected("a", "1", 1.0)
    assert kinds(versions.connected("a", "1")) == [("Prepare", "a")]
    assert versions.tick(9.0) == []
    report(versions, "a", 1, "prepared")
    versions.disconnected("a", "1", 1.0)
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
    assert list(versions.replicas) == ["a"]


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
    assert versions.replicas["b"].version == 1
    assert join(versions, "c", epoch=1) == []  # came back with the committed version, after a restart of the broker


def test_a_late_joiner_whose_source_is_gone_gets_the_next_version() -> None:
    versions = machine("a")
    commit(versions, 1)
    join(versions, "b")
    assert report(versions, "b", 1, "failed", error="process 7 has exited") == []
    assert versions.replicas["b"].error == "process 7 has exited"
    commit(versions, 2)
    assert versions.replicas["b"].version == 2


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
    assert list(versions.replicas) == ["a"]
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
    assert [r.version for r in versions.replicas.values()] == [2, 2]


def test_versions_do_not_go_back_unless_restored() -> None:
    versions = machine("a")
    commit(versions, 5)
    with pytest.raises(VersionRegression):
        begin(versions, 4)
    versions.check_begin(offer(4), versions.last_epoch, replay=True)


def test_other_tensors_are_refused_at_registration_and_at_begin() -> None:
    versions = machine("a")
    commit(versions, 1)
    other = Layout.from_shapes({"v": ([2], "float32")})
    with pytest.raises(LayoutMismatch, match="missing w"):
        versions.register(Replica("b", "1", other), 0.0)
    assert "b" not in versions.replicas
    with pytest.raises(LayoutMismatch, match=r"replica a.*unexpected w"):
        versions.check_begin(offer(2, other), versions.last_epoch, replay=False)


def test_a_new_process_of_a_replica_replaces_the_old_one() -> None:
    versions = machine("a")
    transaction, _ = begin(versions, 1)
    actions = join(versions, "a", incarnation="2")
    assert kinds(actions)[0] == ("Dismiss", "a")
    assert versions.replicas["a"].incarnation == "2"
    assert transaction.phase is Phase.COMMITTED or kinds(actions)[-1] == ("Prepare", "a")
    versions.disconnected("a", "1", 0.0)  # the old stream's end changes nothing
    assert versions.replicas["a"].lost_at is None


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


class AnyOrder(RuleBasedStateMachine):
    """Replicas, publishers and time in any order: what must hold always."""

    names = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.versions = ModelVersions("m", reconnect_seconds=2.0)
        self.now = 0.0
        self.decided: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.asked: dict[str, set[int]] = {}
        self.served: dict[str, int] = {}

    def take(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, Persist):
                phase, epoch = action.transaction.phase, action.transaction.epoch
                if phase is Phase.COMMITTING:
                    assert epoch not in self.aborted
                    self.decided[epoch] = action.transaction.manifest.version
                if phase is Phase.ABORTED:
                    assert epoch not in self.decided, "a decided version was aborted"
                    self.aborted.add(epoch)
            elif isinstance(action, Commit):
                assert action.epoch in self.decided, "COMMIT was sent before the decision was stored"
                self.asked.setdefault(action.replica, set()).add(action.epoch)
            else:
                assert isinstance(action, Prepare | Abort | Dismiss)

    @rule(name=names, incarnation=st.sampled_from("12"), listens=st.booleans())
    def joins(self, name: str, incarnation: str, listens: bool) -> None:
        known = self.versions.replicas.get(name)
        if known is None or known.incarnation != incarnation:
            self.served.pop(name, None)
        self.take(self.versions.register(Replica(name, incarnation, LAYOUT, self.served.get(name, 0)), self.now))
        if listens:
            self.take(self.versions.connected(name, incarnation))

    @rule(name=names)
    def drops(self, name: str) -> None:
        if name in self.versions.replicas:
            self.versions.disconnected(name, self.versions.replicas[name].incarnation, self.now)

    @rule(minimum=st.integers(0, 3))
    def begins(self, minimum: int) -> None:
        version = self.versions.last_epoch + 1
        self.versions.check_begin(offer(version), self.versions.last_epoch, replay=False)
        epoch = self.versions.last_epoch + 1
        _, actions = self.versions.begin(offer(version), epoch, timeout_seconds=5.0, min_replicas=minimum, now=self.now)
        self.take(actions)

    @precondition(lambda self: self.versions.last_epoch)
    @rule(name=names, outcome=st.sampled_from(["prepared", "committed", "failed"]), back=st.sampled_from([0, 0, 0, 1]))
    def answers(self, name: str, outcome: str, back: int) -> None:
        epoch = self.versions.last_epoch - back
        if outcome == "committed" and epoch not in self.asked.get(name, set()):
            return  # a replica swaps only when it was asked
        try:
            actions = self.versions.report(Report(name, "", epoch, outcome, error="x"), self.now)
        except (StaleEpoch, UnknownReplica):
            return
        if outcome == "committed":
            self.served[name] = epoch
        self.take(actions)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.versions.tick(self.now))

    @invariant()
    def nobody_serves_an_undecided_version(self) -> None:
        for replica in self.versions.replicas.values():
            assert replica.epoch == 0 or self.decided[replica.epoch] == replica.epoch

    @invariant()
    def a_version_under_way_always_ends(self) -> None:
        current = self.versions.current
        assert current is None or self.now <= current.deadline

    @invariant()
    def the_committed_version_is_the_last_decided_one(self) -> None:
        if self.decided:
            assert self.versions.committed.epoch == max(self.decided)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
