"""Who may publish what. Pure: no I/O, no clock.

`version` counts optimizer steps and may repeat after a restore; `epoch` counts publishes and never does. A publisher
proves that it is the newest by naming the highest epoch it knows: whoever begins an epoch makes all others stale.
"""

from reflux_weight_broker.refusals import PublisherFenced, VersionInProgress, VersionRegression


def check_publisher(publisher_epoch: int, last_epoch: int, *, under_way: bool) -> None:
    """Raises unless the publisher knows the last begun epoch.

    One that knows more is newer than the broker's memory (Redis was lost): it is believed, and the counter follows it.
    """
    if publisher_epoch >= last_epoch:
        return
    if under_way:
        raise VersionInProgress(
            f"epoch {last_epoch} of another publisher is under way; this one knows epoch {publisher_epoch}"
        )
    raise PublisherFenced(
        f"the publisher knows epoch {publisher_epoch}, but another publisher has begun epoch {last_epoch} since"
    )


def check_version(version: int, committed_version: int | None, *, replay: bool) -> None:
    """Raises `VersionRegression` for a version below the committed one, unless the publisher was restored."""
    if committed_version is not None and version < committed_version and not replay:
        raise VersionRegression(
            f"version {version} is lower than the committed version {committed_version}; "
            "a publisher that was restored from a checkpoint says so with `replay`"
        )


def next_epoch(publisher_epoch: int, last_epoch: int) -> int:
    """One above everything that was ever begun."""
    return max(publisher_epoch, last_epoch) + 1
