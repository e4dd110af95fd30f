"""Steps of one model's state machine, for tests: no clock, no I/O."""

from reflux_transfer.client.offer import SourceRegion
from reflux_weight_broker.actions import Action, Lease, Prepare
from reflux_weight_broker.plan import Manifest, Tensors
from reflux_weight_broker.records import Phase, Registration, Report, Rules, Transaction
from reflux_weight_broker.versions import ModelVersions

TENSORS = Tensors("h1", 1, {"w": ((2,), "float32")})
SHARDED = Tensors("h2", 2, {"w": ((2,), "float32")})
REGION = SourceRegion(0, b"publisher", "shm", 5)


def offer(version: int, tensors: Tensors = TENSORS, **fields: object) -> Manifest:
    values = {"regions": (REGION,), "timeout_seconds": 10.0, **fields}
    return Manifest("m", version, f"request-{version}", tensors, **values)


def machine(*names: str, **rules: object) -> ModelVersions:
    versions = ModelVersions("m", Rules(reconnect_seconds=2.0, **rules))
    for name in names:
        join(versions, name)
    return versions


def join(
    versions: ModelVersions, name: str, incarnation: str = "1", now: float = 0.0, epoch: int = 0, **fields: object
) -> list[Action]:
    claim = Registration(name, incarnation, fields.pop("tensors", TENSORS), epoch=epoch, version=epoch, **fields)
    return versions.register(claim, now) + versions.connected(name, incarnation)


def begin(
    versions: ModelVersions,
    version: int,
    now: float = 0.0,
    minimum: int = 0,
    publisher_epoch: int | None = None,
    **fields: object,
) -> tuple[Transaction, list[Action]]:
    known = versions.last_epoch if publisher_epoch is None else publisher_epoch
    versions.check_begin(offer(version, **fields), known, replay=False)
    epoch = versions.last_epoch + 1
    return versions.begin(offer(version, **fields), epoch, min_replicas=minimum, now=now)


def report(
    versions: ModelVersions, name: str, epoch: int, outcome: str, now: float = 1.0, incarnation: str = "1", **fields
) -> list[Action]:
    return versions.report(Report(name, incarnation, epoch, outcome, **fields), now)


def served(name: str, epoch: int) -> tuple[SourceRegion, ...]:
    """What a replica lets others read."""
    return (SourceRegion(0, name.encode(), "shm", epoch),)


def kinds(actions: list[Action]) -> list[tuple[str, str]]:
    """What is done to whom, leases left out."""
    return [(type(action).__name__, getattr(action, "replica", "")) for action in actions if type(action) is not Lease]


def leases(actions: list[Action]) -> list[tuple[str, int, str, bool]]:
    """Owner, generation, holder, and whether the lease begins."""
    return [(a.owner, a.generation, a.holder, a.deadline > 0) for a in actions if isinstance(a, Lease)]


def source_of(actions: list[Action], replica: str) -> str:
    """From whom a replica is asked to pull; empty when it is not."""
    found = [action.source.name for action in actions if isinstance(action, Prepare) and action.replica == replica]
    return found[-1] if found else ""


def commit(versions: ModelVersions, version: int, serving: bool = False, **fields: object) -> int:
    transaction, _ = begin(versions, version, **fields)
    names = [name for name, replica in versions.fleet.replicas.items() if replica.complete]
    for name in names:
        report(versions, name, transaction.epoch, "prepared", fingerprint=transaction.epoch)
    for name in names:
        regions = served(name, transaction.epoch) if serving else ()
        report(versions, name, transaction.epoch, "committed", regions=regions, fingerprint=transaction.epoch)
    assert transaction.phase is Phase.COMMITTED
    return transaction.epoch
