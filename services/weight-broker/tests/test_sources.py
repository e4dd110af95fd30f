"""Who reads from whom: late joiners, relays, and what happens when a source is gone."""

import pytest
from machine_steps import REGION, begin, commit, join, kinds, leases, machine, report, served, source_of

from reflux_transfer.client.offer import SourceRegion
from reflux_weight_broker.actions import Prepare
from reflux_weight_broker.records import PUBLISHER, Phase


def test_late_joiners_go_to_whoever_has_the_fewest_readers() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    first = join(versions, "b")
    assert (source_of(first, "b"), leases(first)) == (PUBLISHER, [(PUBLISHER, REGION.generation, "b", True)])
    second = join(versions, "c")
    assert (source_of(second, "c"), leases(second)) == ("a", [("a", 1, "c", True)])
    assert kinds(second) == [("Prepare", "c")]
    assert leases(versions.fleet.leases("a")) == [("a", 1, "c", True)]
    done = report(versions, "c", 1, "prepared")
    assert leases(done) == [("a", 1, "c", False)]
    assert kinds(done) == [("Commit", "c")]
    assert versions.fleet.leases("a") == []
    assert versions.fleet.replicas["c"].source == "a"


def test_the_lease_is_taken_before_the_reader_is_told() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    actions = join(versions, "b")
    names = [type(action).__name__ for action in actions]
    assert names.index("Lease") < names.index("Prepare")


def test_those_who_read_in_a_sync_need_no_lease_on_the_publisher() -> None:
    versions = machine("a", "b")
    _, actions = begin(versions, 1)
    assert leases(actions) == []
    assert [source_of(actions, name) for name in "ab"] == [PUBLISHER, PUBLISHER]


@pytest.mark.parametrize("reason", ["generation_gone", "peer_gone", "checksum"])
def test_a_joiner_whose_source_is_gone_takes_another_and_at_last_the_next_version(reason: str) -> None:
    versions = machine("a", "b", "c")
    commit(versions, 1, serving=True)
    actions = join(versions, "d")
    asked = []
    while source := source_of(actions, "d"):
        asked.append(source)
        actions = report(versions, "d", 1, "failed", error="gone", reason=reason)
    assert asked == [PUBLISHER, "a", "b"]
    assert versions.fleet.leases("b") == []
    assert versions.fleet.replicas["d"].epoch == 0
    commit(versions, 2)
    assert versions.fleet.replicas["d"].epoch == 2


def test_other_failures_of_a_joiner_are_not_tried_elsewhere() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    join(versions, "b")
    assert source_of(report(versions, "b", 1, "failed", error="full", reason="engine"), "b") == ""


def test_with_a_limit_of_readers_those_who_have_it_serve_those_who_wait() -> None:
    versions = machine("a", "b", "c", "d", readers_per_source=1)
    transaction, actions = begin(versions, 1)
    assert kinds(actions) == [("Persist", ""), ("Prepare", "a")]
    actions = report(versions, "a", 1, "prepared", regions=served("a", 1))
    assert [source_of(actions, name) for name in "bcd"] == [PUBLISHER, "a", ""]
    actions = report(versions, "c", 1, "prepared", regions=served("c", 1))
    assert source_of(actions, "d") in {"a", "c"}
    report(versions, "d", 1, "prepared")
    assert transaction.phase is Phase.PREPARING
    report(versions, "b", 1, "prepared")
    assert transaction.phase is Phase.COMMITTING


def test_a_member_whose_relay_dies_goes_back_to_the_publisher() -> None:
    versions = machine("a", "b", "c", readers_per_source=1)
    begin(versions, 1)
    actions = report(versions, "a", 1, "prepared", regions=served("a", 1))
    assert source_of(actions, "c") == "a"
    assert source_of(report(versions, "b", 1, "prepared"), "c") == ""  # it is being served
    actions = report(versions, "c", 1, "failed", error="process 7 has exited", reason="peer_gone")
    assert source_of(actions, "c") == PUBLISHER
    report(versions, "c", 1, "prepared")
    assert versions.current.phase is Phase.COMMITTING


def test_a_dead_publisher_aborts_when_nobody_else_has_the_bytes() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "failed", error="the publisher has exited", reason="peer_gone")
    assert (transaction.phase, transaction.error) == (Phase.ABORTED, "replica a: the publisher has exited")


def test_a_reader_that_waits_for_room_is_not_dismissed_for_it() -> None:
    versions = machine("a", "b", readers_per_source=1)
    transaction, _ = begin(versions, 1)
    versions.tick(11.0)
    assert transaction.error == "a did not prepare within 10 s"
    assert list(versions.fleet.replicas) == ["b"]


def test_a_joiner_that_hangs_is_dismissed_after_its_own_time() -> None:
    versions = machine("a", join_seconds=30.0)
    commit(versions, 1)
    join(versions, "b", now=2.0)
    assert kinds(versions.tick(31.0)) == []
    assert kinds(versions.tick(33.0)) == [("Dismiss", "b")]


def test_a_delta_is_for_those_at_its_base_and_everyone_else_gets_the_whole() -> None:
    versions = machine("a", "b")
    commit(versions, 1)
    join(versions, "c")
    _, actions = begin(versions, 2, kind="delta", base_epoch=1)
    assert {a.replica: a.source.kind for a in actions if isinstance(a, Prepare)} == {
        "a": "delta", "b": "delta", "c": "full",
    }  # fmt: skip
    retried = report(versions, "a", 2, "failed", error="other weights", reason="base_mismatch")
    assert [(a.epoch, a.source.kind) for a in retried if isinstance(a, Prepare)] == [(2, "full")]
    report(versions, "a", 2, "failed", error="other weights", reason="base_mismatch")
    assert versions.current is None  # the same answer to the whole version is a failure


def test_peers_serve_a_delta_in_full() -> None:
    versions = machine("a")
    commit(versions, 1)
    commit(versions, 2, serving=True, kind="delta", base_epoch=1)
    join(versions, "b")
    actions = join(versions, "c")
    assert [(a.source.name, a.source.kind) for a in actions if isinstance(a, Prepare)] == [("a", "full")]


def test_a_source_that_others_doubt_serves_nobody() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    versions.fleet.doubt("a", "probe", "differs")
    join(versions, "b")
    assert source_of(join(versions, "c"), "c") == PUBLISHER


def test_what_a_replica_offers_is_known_again_after_its_registration() -> None:
    versions = machine()
    commit(versions, 1)
    join(versions, "a", epoch=1)
    report(versions, "a", 1, "committed", regions=served("a", 1))
    join(versions, "b")
    assert source_of(join(versions, "c"), "c") == "a"


def test_a_new_duty_ends_the_lease_of_the_old_one() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    join(versions, "b")
    _, actions = begin(versions, 2)
    assert leases(actions) == [(PUBLISHER, REGION.generation, "b", False)]


def test_leases_name_every_generation_of_a_sharded_source() -> None:
    versions = machine()
    regions = (SourceRegion(0, b"x", "shm", 3), SourceRegion(1, b"y", "shm", 4))
    commit(versions, 1, regions=regions)
    assert leases(join(versions, "a")) == [(PUBLISHER, 3, "a", True), (PUBLISHER, 4, "a", True)]
