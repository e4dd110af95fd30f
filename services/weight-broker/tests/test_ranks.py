"""Replicas of several ranks: they prepare and commit together, or not at all."""

import pytest
from machine_steps import SHARDED, TENSORS, begin, join, kinds, machine, offer, report

from reflux_transfer.client.offer import SourceRegion
from reflux_weight_broker.records import Phase, Registration
from reflux_weight_broker.refusals import UnknownReplica
from reflux_weight_broker.versions import ModelVersions


def group(versions: ModelVersions, name: str = "a", **fields: object) -> None:
    for rank in range(2):
        join(versions, name, f"i{rank}", rank=rank, tensors=SHARDED, **fields)


def both(versions: ModelVersions, epoch: int, outcome: str, **fields: object) -> list:
    return [report(versions, "a", epoch, outcome, incarnation=f"i{rank}", **fields) for rank in range(2)]


def test_all_ranks_prepare_and_commit_together() -> None:
    versions = machine()
    group(versions)
    transaction, actions = begin(versions, 1)
    assert kinds(actions) == [("Persist", ""), ("Prepare", "a"), ("Prepare", "a")]
    first, second = both(versions, 1, "prepared", bytes=8)
    assert (first, kinds(second)) == ([], [("Persist", ""), ("Commit", "a"), ("Commit", "a")])
    report(versions, "a", 1, "committed", incarnation="i0")
    replica = versions.fleet.replicas["a"]
    assert (replica.epoch, replica.unhealthy) == (0, "its ranks serve different epochs")
    report(versions, "a", 1, "committed", incarnation="i1")
    assert (replica.epoch, replica.version, replica.unhealthy) == (1, 1, "")
    assert (transaction.phase, transaction.bytes) == (Phase.COMMITTED, 16)


def test_a_replica_takes_part_when_all_its_ranks_are_there() -> None:
    versions = machine()
    join(versions, "a", "i0", rank=0, tensors=SHARDED)
    assert versions.fleet.replicas["a"].unhealthy == "1 of 2 ranks are there"
    transaction, actions = begin(versions, 1, minimum=1)
    assert kinds(actions) == [("Persist", "")]
    assert kinds(join(versions, "a", "i1", rank=1, tensors=SHARDED)) == [("Prepare", "a"), ("Prepare", "a")]
    both(versions, 1, "prepared")
    assert transaction.phase is Phase.COMMITTING


def test_one_rank_that_fails_fails_for_all() -> None:
    versions = machine()
    group(versions)
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared", incarnation="i0")
    actions = report(versions, "a", 1, "failed", incarnation="i1", error="no memory")
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Abort", "a")]
    assert transaction.error == "replica a: no memory"


def test_a_rank_that_dies_takes_its_replica_with_it() -> None:
    versions = machine()
    group(versions)
    begin(versions, 1)
    versions.fleet.lost("a", "i1", 1.0)
    assert kinds(versions.tick(3.5))[:2] == [("Dismiss", "a"), ("Dismiss", "a")]
    with pytest.raises(UnknownReplica):
        report(versions, "a", 1, "prepared", incarnation="i0")
    group(versions)  # all of them register again
    assert versions.fleet.replicas["a"].complete


def test_a_new_process_of_one_rank_makes_all_ranks_register_again() -> None:
    versions = machine()
    group(versions)
    actions = join(versions, "a", "new", rank=1, tensors=SHARDED)
    assert kinds(actions) == [("Dismiss", "a"), ("Dismiss", "a")]
    assert list(versions.fleet.replicas["a"].seats) == [1]


def test_a_rank_that_is_behind_brings_all_of_them_to_the_version() -> None:
    versions = machine()
    versions.begin(offer(1), 1, min_replicas=0, now=0.0)
    join(versions, "a", "i0", rank=0, tensors=SHARDED, epoch=1)
    assert kinds(join(versions, "a", "i1", rank=1, tensors=SHARDED)) == [("Prepare", "a"), ("Prepare", "a")]
    first, second = both(versions, 1, "prepared")
    assert (first, kinds(second)) == ([], [("Commit", "a"), ("Commit", "a")])
    both(versions, 1, "committed")
    assert versions.fleet.replicas["a"].epoch == 1


def test_only_a_replica_whose_ranks_all_offer_is_a_source() -> None:
    versions = machine()
    group(versions)
    begin(versions, 1)
    both(versions, 1, "prepared")
    report(versions, "a", 1, "committed", incarnation="i0", regions=(SourceRegion(0, b"x", "shm", 1),))
    report(versions, "a", 1, "committed", incarnation="i1")
    assert versions.fleet.replicas["a"].offers(1) == ()
    report(versions, "a", 1, "committed", incarnation="i1", regions=(SourceRegion(1, b"y", "shm", 1),))
    assert [region.rank for region in versions.fleet.replicas["a"].offers(1)] == [0, 1]


def test_another_layout_replaces_the_whole_replica() -> None:
    versions = machine("a")
    actions = versions.register(Registration("a", "9", SHARDED, rank=1), 0.0)
    assert kinds(actions) == [("Dismiss", "a")]
    assert versions.fleet.replicas["a"].tensors is SHARDED
    assert versions.fleet.replicas["a"].tensors is not TENSORS


def test_a_good_rank_does_not_vouch_for_a_bad_one() -> None:
    versions = machine()
    group(versions)
    begin(versions, 1)
    both(versions, 1, "prepared", fingerprint=1)
    report(versions, "a", 1, "committed", incarnation="i1", fingerprint=2)
    report(versions, "a", 1, "committed", incarnation="i0", fingerprint=1)
    assert "fingerprint 0000000000000002" in versions.fleet.replicas["a"].unhealthy
