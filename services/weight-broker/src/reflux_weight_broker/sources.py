"""Who serves whom: the publisher, or a replica that holds the epoch, whichever has fewer readers. Pure.

With a limit of readers per source a wide fleet becomes a tree by itself: those who find no room wait, and whoever has
prepared serves the next.
"""

from collections import Counter
from collections.abc import Iterable

from reflux_weight_broker.plan import Manifest
from reflux_weight_broker.records import PUBLISHER, Duty, Replica, Source, Step


def peers(epoch: int, manifest: Manifest, replicas: Iterable[Replica]) -> list[Source]:
    """Replicas that hold the epoch and let others read it, in order of registration."""
    kind = "adapter" if manifest.kind == "adapter" else "full"
    return [
        Source(replica.name, replica.tensors.hash, regions, kind)
        for replica in replicas
        if not replica.doubts and (regions := replica.offers(epoch))
    ]


def for_reader(reader: Replica, duty: Duty, others: Iterable[Source]) -> list[Source]:
    """Sources that a reader can use and has not tried; the publisher first."""
    manifest = duty.manifest
    kind = "full" if manifest.kind == "delta" and not duty.base_served else manifest.kind
    found = [Source(PUBLISHER, manifest.tensors.hash, manifest.regions, kind)]
    found += [source for source in others if source.name != reader.name]
    return [source for source in found if source.name not in duty.tried]


def choose(sources: Iterable[Source], readers: Counter[str], limit: int) -> Source | None:
    """The source with the fewest readers, the first of equals; None while all have `limit` of them (0: no limit)."""
    free = [source for source in sources if not limit or readers[source.name] < limit]
    return min(free, key=lambda source: readers[source.name], default=None)


def count(replicas: Iterable[Replica]) -> Counter[str]:
    """Replicas that read from each source now."""
    reading = (r.duty.source for r in replicas if r.duty and r.duty.source and r.at(Step.PREPARE))
    return Counter(source.name for source in reading)
