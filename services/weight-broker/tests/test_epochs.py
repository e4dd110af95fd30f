import pytest

from reflux_weight_broker.epochs import check_publisher, check_version, next_epoch
from reflux_weight_broker.refusals import PublisherFenced, VersionInProgress, VersionRegression


def test_only_a_publisher_that_knows_the_last_epoch_may_begin() -> None:
    check_publisher(5, 5, under_way=False)
    check_publisher(5, 5, under_way=True)
    check_publisher(9, 5, under_way=False)  # Redis was lost: the checkpoint's epoch is believed
    with pytest.raises(PublisherFenced, match="another publisher has begun epoch 5"):
        check_publisher(4, 5, under_way=False)
    with pytest.raises(VersionInProgress):
        check_publisher(4, 5, under_way=True)


def test_a_lower_version_needs_a_restored_publisher() -> None:
    check_version(3, None, replay=False)
    check_version(3, 3, replay=False)
    check_version(2, 3, replay=True)
    with pytest.raises(VersionRegression, match="version 2 is lower than the committed version 3"):
        check_version(2, 3, replay=False)


def test_epochs_are_above_everything_known() -> None:
    assert next_epoch(0, 0) == 1
    assert next_epoch(3, 7) == 8
    assert next_epoch(9, 7) == 10
