"""The versions of one model: PREPARE, COMMIT, ABORT over its replicas. Pure: no I/O; callers pass the monotonic time.

Every method that changes something returns the actions to carry out, in order. Rules:
- At most one version is under way. It commits when all replicas have prepared, and at least `min_replicas` have.
- A replica that fails while it prepares aborts the version for all. One that does not answer in time does too, and is
  dismissed.
- A replica whose stream stays away is dismissed; the version goes on without it.
- After the decision to commit there is no way back: a replica that cannot follow is dismissed.
- A replica that is not at the committed epoch and in no version under way is brought there on its own.
"""

from collections.abc import Collection

from reflux_weight_broker.epochs import check_publisher, check_version
from reflux_weight_broker.plan import Manifest, check_layouts
from reflux_weight_broker.records import (
    Abort,
    Action,
    Commit,
    Committed,
    Dismiss,
    Duty,
    Persist,
    Phase,
    Prepare,
    Replica,
    Report,
    Step,
    Transaction,
)
from reflux_weight_broker.refusals import StaleEpoch, UnknownReplica


class ModelVersions:
    """State machine of one model."""

    def __init__(
        self, model_id: str, *, reconnect_seconds: float, last_epoch: int = 0, committed: Committed | None = None
    ) -> None:
        self.model_id = model_id
        self.last_epoch = last_epoch
        self.committed = committed
        self.replicas: dict[str, Replica] = {}
        self.current: Transaction | None = None
        self._reconnect_seconds = reconnect_seconds

    def register(self, replica: Replica, now: float) -> list[Action]:
        """Adds a replica; the same incarnation again only refreshes what it serves. Raises `LayoutMismatch`."""
        known = self.replicas.get(replica.name)
        if known and known.incarnation == replica.incarnation:
            known.epoch, known.version = replica.epoch, replica.version
            return []
        target = self._target()
        if target:
            check_layouts(target.manifest.layout, replica.layout, replica.name)
        actions = self._remove(known, "replaced by a new process", now) if known else []
        replica.lost_at = now
        self.replicas[replica.name] = replica
        self._assign(replica)
        return actions

    def connected(self, name: str, incarnation: str) -> list[Action]:
        """The replica listens (again): repeats what it owes. Raises `UnknownReplica`."""
        replica = self._replica(name, incarnation)
        replica.lost_at = None
        return self._remind(replica)

    def disconnected(self, name: str, incarnation: str, now: float) -> None:
        """The replica's stream ended; it has some seconds to come back."""
        replica = self.replicas.get(name)
        if replica and replica.incarnation == incarnation and replica.lost_at is None:
            replica.lost_at = now

    def deregister(self, name: str, now: float) -> list[Action]:
        """Removes a replica. Raises `UnknownReplica`."""
        if name not in self.replicas:
            raise UnknownReplica(f"replica {name} is not registered")
        return self._remove(self.replicas[name], "deregistered", now)

    def check_begin(self, manifest: Manifest, publisher_epoch: int, *, replay: bool) -> None:
        """Raises the refusal that `begin` would deserve; changes nothing."""
        check_publisher(publisher_epoch, self.last_epoch, under_way=self.current is not None)
        committed_version = self.committed.manifest.version if self.committed else None
        check_version(manifest.version, committed_version, replay=replay)
        for replica in self.replicas.values():
            check_layouts(manifest.layout, replica.layout, replica.name)

    def begin(
        self, manifest: Manifest, epoch: int, *, timeout_seconds: float, min_replicas: int, now: float
    ) -> tuple[Transaction, list[Action]]:
        """Starts a version under a fresh epoch after `check_begin`; one that still prepares is aborted."""
        assert epoch > self.last_epoch, "epochs never repeat"
        everyone, actions = list(self.replicas.values()), []
        if self.current and self.current.phase is Phase.COMMITTING:
            actions += self._end(self.current, Phase.COMMITTED, now)  # decided: the stragglers get the next one
        elif self.current:
            actions += self._abort(self.current, f"superseded by epoch {epoch}", now, leaving=everyone)
        self.last_epoch = epoch
        transaction = Transaction(epoch, manifest, timeout_seconds, min_replicas, now, now + timeout_seconds)
        self.current = transaction
        for replica in everyone:
            self._assign(replica)
        actions.append(Persist(transaction.snapshot()))
        for replica in everyone:
            actions += self._remind(replica)
        return transaction, actions + self._advance(now)

    def report(self, report: Report, now: float) -> list[Action]:
        """Takes an acknowledgement; repeated ones are fine. Raises `UnknownReplica` or `StaleEpoch`."""
        replica = self._replica(report.replica, report.incarnation)
        if not replica.owes(report.epoch):
            if report.outcome == "committed" and replica.epoch == report.epoch:
                return []
            raise StaleEpoch(f"epoch {report.epoch} is not under way for replica {report.replica}")
        if report.outcome == "failed":
            return self._failed(replica, report, now)
        if report.outcome == "prepared":
            return self._prepared(replica, report, now)
        return self._committed(replica, report, now)

    def tick(self, now: float) -> list[Action]:
        """Applies deadlines; call it a few times per second."""
        actions: list[Action] = []
        for replica in list(self.replicas.values()):
            if replica.lost_at is not None and now - replica.lost_at > self._reconnect_seconds:
                actions += self._remove(replica, "its stream ended and did not come back", now)
        transaction = self.current
        if transaction and now > transaction.deadline:
            actions += self._expire(transaction, now)
        return actions

    def _expire(self, transaction: Transaction, now: float) -> list[Action]:
        wanted = Step.PREPARE if transaction.phase is Phase.PREPARING else Step.COMMIT
        late = [r for r in self._members(transaction) if r.duty and r.duty.step is wanted]
        actions: list[Action] = []
        if transaction.phase is Phase.PREPARING:
            reason = f"{', '.join(replica.name for replica in late)} did not prepare"
            if not late:
                present = len(self._members(transaction))
                reason = f"{present} of at least {transaction.min_replicas} replicas were there"
            actions += self._abort(transaction, f"{reason} within {transaction.timeout_seconds:g} s", now, leaving=late)
        for replica in late:
            actions += self._remove(replica, f"did not answer epoch {transaction.epoch} in time", now)
        return actions

    def _failed(self, replica: Replica, report: Report, now: float) -> list[Action]:
        replica.error = report.error
        transaction = self._current(report.epoch)
        if transaction is None:
            # A late joiner whose source is gone or changing waits for the next version.
            replica.duty = None
            return []
        if transaction.phase is Phase.PREPARING:
            return self._abort(transaction, f"replica {replica.name}: {report.error}", now)
        return self._remove(replica, f"could not commit epoch {report.epoch}: {report.error}", now)

    def _prepared(self, replica: Replica, report: Report, now: float) -> list[Action]:
        assert replica.duty is not None
        if replica.duty.step is not Step.PREPARE:
            return []
        replica.duty.step, replica.transfer_seconds, replica.error = Step.WAIT, report.transfer_seconds, ""
        transaction = self._current(report.epoch)
        if transaction:
            transaction.bytes += report.bytes
            return self._advance(now)
        replica.duty.step = Step.COMMIT
        return self._remind(replica)

    def _committed(self, replica: Replica, report: Report, now: float) -> list[Action]:
        assert replica.duty is not None
        if replica.duty.step is not Step.COMMIT:
            raise StaleEpoch(f"replica {replica.name} committed epoch {report.epoch} before it was asked to")
        replica.epoch, replica.version = report.epoch, replica.duty.manifest.version
        replica.pause_ms, replica.fingerprint, replica.duty = report.pause_ms, report.fingerprint, None
        return self._advance(now) if self._current(report.epoch) else []

    def _advance(self, now: float) -> list[Action]:
        """Moves the current version on when its replicas allow it."""
        transaction, actions = self.current, []
        if transaction and transaction.phase is Phase.PREPARING:
            members = self._members(transaction)
            waiting = all(replica.duty and replica.duty.step is Step.WAIT for replica in members)
            if not waiting or len(members) < transaction.min_replicas:
                return []
            transaction.phase, transaction.prepared_at = Phase.COMMITTING, now
            transaction.deadline = now + transaction.timeout_seconds
            self.committed = Committed(transaction.epoch, transaction.manifest)
            actions.append(Persist(transaction.snapshot()))
            for replica in members:
                assert replica.duty is not None
                replica.duty.step = Step.COMMIT
                actions += self._remind(replica)
        if transaction and transaction.phase is Phase.COMMITTING and not self._members(transaction):
            actions += self._end(transaction, Phase.COMMITTED, now)
            for replica in self.replicas.values():  # those that came while it was committing
                self._assign(replica)
                actions += self._remind(replica)
        return actions

    def _abort(
        self, transaction: Transaction, reason: str, now: float, *, leaving: Collection[Replica] = ()
    ) -> list[Action]:
        transaction.error = reason
        members = self._members(transaction)
        actions = self._end(transaction, Phase.ABORTED, now)
        for replica in members:
            replica.duty = None
            if replica.lost_at is None:
                arguments = (replica.name, replica.incarnation, transaction.epoch, transaction.manifest.version)
                actions.append(Abort(*arguments))
            if replica not in leaving:
                self._assign(replica)
                actions += self._remind(replica)
        return actions

    def _end(self, transaction: Transaction, phase: Phase, now: float) -> list[Action]:
        transaction.phase, transaction.ended_at, self.current = phase, now, None
        return [Persist(transaction.snapshot())]

    def _remove(self, replica: Replica, reason: str, now: float) -> list[Action]:
        replica.error = replica.error or reason
        del self.replicas[replica.name]
        transaction = self.current
        involved = transaction is not None and replica.owes(transaction.epoch)
        dismissal = Dismiss(replica.name, replica.incarnation, reason)
        return [dismissal, *(self._advance(now) if involved else [])]

    def _target(self) -> Transaction | Committed | None:
        """What a replica without a duty should be brought to."""
        if self.current and self.current.phase is Phase.PREPARING:
            return self.current
        return None if self.current else self.committed

    def _assign(self, replica: Replica) -> None:
        target = self._target()
        if target and replica.epoch != target.epoch and not replica.owes(target.epoch):
            replica.duty = Duty(target.epoch, target.manifest)
            if isinstance(target, Transaction):
                target.members[replica.name] = replica

    def _remind(self, replica: Replica) -> list[Action]:
        duty = replica.duty
        if duty is None or replica.lost_at is not None or duty.step is Step.WAIT:
            return []
        if duty.step is Step.PREPARE:
            return [Prepare(replica.name, replica.incarnation, duty.epoch, duty.manifest)]
        return [Commit(replica.name, replica.incarnation, duty.epoch, duty.manifest.version)]

    def _members(self, transaction: Transaction) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.owes(transaction.epoch)]

    def _current(self, epoch: int) -> Transaction | None:
        return self.current if self.current and self.current.epoch == epoch else None

    def _replica(self, name: str, incarnation: str) -> Replica:
        replica = self.replicas.get(name)
        if replica is None or (incarnation and replica.incarnation != incarnation):
            raise UnknownReplica(f"replica {name} is not registered with this incarnation: register again")
        return replica
