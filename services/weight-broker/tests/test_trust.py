"""Fingerprints that must agree before anything is committed, and probes that tell who computes something else."""

import pytest
from machine_steps import begin, commit, join, kinds, machine, report, served, source_of

from reflux_weight_broker.health import Health, Thresholds
from reflux_weight_broker.plan import Tensors
from reflux_weight_broker.records import Phase
from reflux_weight_broker.refusals import StaleEpoch, UnknownReplica


def test_a_wrong_fingerprint_is_never_committed_and_both_are_named() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    report(versions, "a", 1, "prepared", fingerprint=0xA)
    actions = report(versions, "b", 1, "prepared", fingerprint=0xB)
    assert kinds(actions) == [("Persist", ""), ("Abort", "a"), ("Abort", "b")]
    assert transaction.phase is Phase.ABORTED
    for text in ("b has fingerprint 000000000000000b", "a has 000000000000000a"):
        assert text in transaction.error
    assert versions.committed is None


def test_the_agreed_fingerprint_is_part_of_the_version() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    for name in "ab":
        report(versions, name, 1, "prepared", fingerprint=7)
    assert (transaction.fingerprint, versions.committed.fingerprint) == (7, 7)


def test_a_joiner_with_another_fingerprint_tries_another_source_and_is_not_committed() -> None:
    versions = machine("a")
    commit(versions, 1, serving=True)
    join(versions, "b")
    actions = report(versions, "b", 1, "prepared", fingerprint=99)
    assert source_of(actions, "b") == "a"
    assert kinds(report(versions, "b", 1, "prepared", fingerprint=1)) == [("Commit", "b")]


def test_one_that_serves_something_else_under_the_epoch_is_unhealthy_until_the_next_version() -> None:
    versions = machine("a")
    commit(versions, 1)
    actions = join(versions, "b", epoch=1, fingerprint=99)
    replica = versions.fleet.replicas["b"]
    assert "b has fingerprint 0000000000000063 of epoch 1" in replica.unhealthy
    assert (replica.epoch, kinds(actions)) == (0, [("Prepare", "b")])
    report(versions, "b", 1, "failed", error="x")
    commit(versions, 2)
    assert (replica.unhealthy, replica.epoch) == ("", 2)


def test_a_replica_that_reports_other_bytes_after_the_commit_is_unhealthy() -> None:
    versions = machine("a")
    begin(versions, 1)
    report(versions, "a", 1, "prepared", fingerprint=1)
    report(versions, "a", 1, "committed", fingerprint=2)
    assert "fingerprint" in versions.fleet.replicas["a"].unhealthy


def test_what_is_overwritten_in_place_is_not_to_be_asked_meanwhile() -> None:
    versions = machine()
    join(versions, "a", mode="in_place")
    begin(versions, 1)
    replica = versions.fleet.replicas["a"]
    assert replica.unhealthy == ""
    report(versions, "a", 1, "prepared")
    assert replica.unhealthy == "its weights are being overwritten"
    assert kinds(report(versions, "a", 1, "failed", error="gone", reason="peer_gone"))[0] == ("Dismiss", "a")


def test_a_probe_that_differs_makes_the_replica_unhealthy_and_a_good_one_ends_that() -> None:
    versions = machine("a", "b")
    commit(versions, 1, serving=True)
    assert versions.probe(1, "a", [-1.0, -2.0]) == {}  # the learner has not said anything yet
    verdicts = versions.probe(1, "", [-1.0, -2.001])
    assert "differs by 0.001" in verdicts["a"]
    assert versions.probe(1, "b", [-1.0, -2.001]) == {"b": ""}
    assert [bool(versions.fleet.replicas[name].unhealthy) for name in "ab"] == [True, False]
    commit(versions, 2)
    assert versions.fleet.replicas["a"].unhealthy, "new weights do not mend arithmetic"
    versions.probe(2, "", [-1.0])
    versions.probe(2, "a", [-1.00005])
    assert versions.fleet.replicas["a"].unhealthy == ""


def test_probes_of_unknown_epochs_and_replicas_are_refused() -> None:
    versions = machine("a")
    with pytest.raises(StaleEpoch):
        versions.probe(1, "", [1.0])
    commit(versions, 1)
    with pytest.raises(UnknownReplica):
        versions.probe(1, "z", [1.0])
    with pytest.raises(StaleEpoch):
        versions.probe(2, "a", [1.0])


@pytest.mark.parametrize(
    ("dtypes", "difference", "healthy"),
    [
        (["float32"], 0.9e-4, True),
        (["float32"], 1.1e-4, False),
        (["float32", "bfloat16"], 4.9e-2, True),
        (["bfloat16"], 5.1e-2, False),
        (["float32"], float("nan"), False),
    ],
)
def test_the_threshold_follows_the_narrowest_type(dtypes: list[str], difference: float, healthy: bool) -> None:
    tensors = Tensors("h", 1, {str(index): ((1,), dtype) for index, dtype in enumerate(dtypes)})
    health = Health(Thresholds())
    health.report(1, "", [0.0, -1.0], tensors)
    assert (health.report(1, "a", [0.0, -1.0 + difference], tensors) == {"a": ""}) is healthy


def test_a_probe_of_another_length_is_a_fault() -> None:
    health = Health(Thresholds())
    tensors = Tensors("h", 1, {"w": ((1,), "float32")})
    health.report(1, "a", [0.0], tensors)
    assert "1 log-probs, the learner has 2" in health.report(1, "", [0.0, 0.0], tensors)["a"]


def test_a_lost_redis_never_repeats_an_epoch() -> None:
    versions = machine()  # Redis is empty, the replica is not
    join(versions, "a", epoch=7)
    transaction, actions = begin(versions, 1)
    assert transaction.epoch == 8
    assert kinds(actions)[-1] == ("Prepare", "a")
    report(versions, "a", 8, "prepared", regions=served("a", 8))


def test_control_messages_are_counted_and_do_not_depend_on_the_size_of_the_model() -> None:
    versions = machine("a", "b")
    transaction, _ = begin(versions, 1)
    for outcome in ("prepared", "committed"):
        for name in "ab":
            report(versions, name, 1, outcome)
    # two calls and three changes of the publisher, and per replica PREPARE, COMMIT and two acknowledgements
    assert transaction.control_messages == 2 + 3 + 2 * 4
