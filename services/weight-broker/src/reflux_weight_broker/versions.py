"""The versions of one model: PREPARE, COMMIT, ABORT over its replicas. Pure: no I/O; callers pass the monotonic time.

Every method that changes something returns the actions to carry out, in order. Rules:
- At most one version is under way. It commits when all replicas have prepared, and at least `min_replicas` have. A
  replica has prepared, or committed, when all its ranks have.
- Every rank reports the fingerprint of the version that it holds (a part of): one that differs aborts the version.
- A replica that fails while it prepares aborts the version for all, unless its source was at fault and there is another
  one. One that does not answer in time aborts it too, and is dismissed.
- A replica of which a rank's stream stays away is dismissed; the version goes on without it.
- After the decision to commit there is no way back: a replica that cannot follow is dismissed.
- A replica that is not at the committed epoch and in no version under way is brought there on its own.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from reflux_weight_broker.actions import Action, Persist
from reflux_weight_broker.epochs import check_publisher, check_version
from reflux_weight_broker.fleet import Fleet
from reflux_weight_broker.health import Health
from reflux_weight_broker.plan import Manifest, check_layouts
from reflux_weight_broker.records import Committed, Phase, Registration, Replica, Report, Rules, Seat, Step, Transaction
from reflux_weight_broker.refusals import StaleEpoch


class ModelVersions:
    """State machine of one model."""

    def __init__(self, model_id: str, rules: Rules, *, last_epoch: int = 0, committed: Committed | None = None) -> None:
        self.model_id = model_id
        self.last_epoch = last_epoch
        self.committed = committed
        self.current: Transaction | None = None
        self.fleet = Fleet(rules.readers_per_source)
        self._rules, self._health = rules, Health(rules.thresholds)

    def register(self, registration: Registration, now: float) -> list[Action]:
        """Adds a rank; the same incarnation again only refreshes what it serves. Raises `LayoutMismatch`."""
        # Whatever a replica serves was begun once, even when Redis has lost the counter.
        self.last_epoch = max(self.last_epoch, registration.epoch)
        known = self.fleet.known(registration)
        actions: list[Action] = []
        if known is None:
            target = self._target()
            if target:
                check_layouts(target.manifest.tensors, registration.tensors, registration.replica)
            if replaced := self.fleet.replaced_by(registration):
                actions = self._remove(replaced, "replaced by a new process", now)
            known = self.fleet.add(registration, now)
        replica, seat = known
        self._serves(replica, seat, registration)
        return actions + self._assign([replica], now) + self._dispatch()

    def connected(self, name: str, incarnation: str) -> list[Action]:
        """The rank listens (again): repeats what it owes. Raises `UnknownReplica`."""
        replica, seat = self.fleet.find(name, incarnation)
        seat.lost_at = None
        return self._told(replica, self.fleet.remind(replica, [seat]))

    def deregister(self, name: str, now: float) -> list[Action]:
        """Removes a replica. Raises `UnknownReplica`."""
        return self._remove(self.fleet.named(name), "deregistered", now)

    def check_begin(self, manifest: Manifest, publisher_epoch: int, *, replay: bool) -> None:
        """Raises the refusal that `begin` would deserve; changes nothing."""
        check_publisher(publisher_epoch, self.last_epoch, under_way=self.current is not None)
        committed_version = self.committed.manifest.version if self.committed else None
        check_version(manifest.version, committed_version, replay=replay)
        for replica in self.fleet.replicas.values():
            check_layouts(manifest.tensors, replica.tensors, replica.name)

    def begin(
        self, manifest: Manifest, epoch: int, *, min_replicas: int, now: float
    ) -> tuple[Transaction, list[Action]]:
        """Starts a version under a fresh epoch after `check_begin`; one that still prepares is aborted."""
        assert epoch > self.last_epoch, "epochs never repeat"
        everyone, actions = list(self.fleet.replicas.values()), []
        if self.current and self.current.phase is Phase.COMMITTING:
            actions += self._end(self.current, Phase.COMMITTED, now)  # decided: the stragglers get the next one
        elif self.current:
            actions += self._abort(self.current, f"superseded by epoch {epoch}", now, leaving=everyone)
        self.last_epoch = epoch
        transaction = Transaction(epoch, manifest, min_replicas, now, now + manifest.timeout_seconds)
        self.current = transaction
        actions += self._assign(everyone, now)
        actions.append(self._persist(transaction))
        return transaction, actions + self._dispatch() + self._advance(now)

    def report(self, report: Report, now: float) -> list[Action]:
        """Takes an acknowledgement; repeated ones are fine. Raises `UnknownReplica` or `StaleEpoch`."""
        replica, seat = self.fleet.find(report.replica, report.incarnation, report.rank)
        if report.outcome == "committed" and seat.epoch == report.epoch and seat.step is not Step.COMMIT:
            _offer(seat, report)
            return self._dispatch()
        if not replica.owes(report.epoch):
            raise StaleEpoch(f"epoch {report.epoch} is not under way for replica {report.replica}")
        if transaction := self._current(report.epoch):
            transaction.control_messages += 1
        if report.outcome == "failed":
            return self._failed(replica, seat, report, now)
        if report.outcome == "prepared":
            return self._prepared(replica, seat, report, now)
        return self._committed(replica, seat, report, now)

    def probe(self, epoch: int, replica: str, logprobs: Sequence[float]) -> dict[str, str]:
        """Takes log-probs of the probe prompt (empty name: the learner's); returns what is wrong with whom.

        Raises `UnknownReplica` or `StaleEpoch`.
        """
        target = self._current(epoch) or self.committed
        if target is None or target.epoch != epoch:
            raise StaleEpoch(f"epoch {epoch} is neither under way nor committed")
        if replica:
            self.fleet.named(replica)
        verdicts = self._health.report(epoch, replica, logprobs, target.manifest.tensors)
        for name, fault in verdicts.items():
            self.fleet.doubt(name, "probe", fault)
        return verdicts

    def tick(self, now: float) -> list[Action]:
        """Applies deadlines; call it a few times per second."""
        actions: list[Action] = []
        for replica in self.fleet.away(now - self._rules.reconnect_seconds):
            actions += self._remove(replica, "its stream ended and did not come back", now)
        transaction = self.current
        if transaction and now > transaction.deadline:
            actions += self._expire(transaction, now)
        for replica in self.fleet.overdue(now):
            if replica.duty and not self._current(replica.duty.epoch):
                actions += self._remove(replica, f"did not answer epoch {replica.duty.epoch} in time", now)
        return actions

    def _serves(self, replica: Replica, seat: Seat, claim: Registration) -> None:
        """Believes what a rank says it serves, unless the fingerprint is not the one that was agreed on."""
        seat.epoch, seat.version, seat.fingerprint = claim.epoch, claim.version, claim.fingerprint
        if clash := self._clash(replica, claim.epoch, claim.fingerprint):
            replica.doubts[_fingerprint_of(seat)] = clash
            seat.epoch = seat.version = 0

    def _clash(self, replica: Replica, epoch: int, fingerprint: int) -> str:
        """How a fingerprint contradicts those that were reported before it; empty when it does not, or is unknown."""
        expected, witness = 0, "the committed version"
        if transaction := self._current(epoch):
            if fingerprint and not transaction.fingerprint:
                transaction.fingerprint, transaction.witness = fingerprint, replica.name
            expected, witness = transaction.fingerprint, transaction.witness
        elif self.committed and self.committed.epoch == epoch:
            expected = self.committed.fingerprint
        if not fingerprint or not expected or fingerprint == expected:
            return ""
        return f"{replica.name} has fingerprint {fingerprint:016x} of epoch {epoch}, {witness} has {expected:016x}"

    def _expire(self, transaction: Transaction, now: float) -> list[Action]:
        wanted = Step.PREPARE if transaction.phase is Phase.PREPARING else Step.COMMIT
        late = [replica for replica in self.fleet.owing(transaction.epoch) if replica.at(wanted)]
        actions: list[Action] = []
        if transaction.phase is Phase.PREPARING:
            reason = f"{', '.join(replica.name for replica in late)} did not prepare"
            if not late:
                present = len(self.fleet.owing(transaction.epoch))
                reason = f"{present} of at least {transaction.min_replicas} replicas were there"
            actions += self._abort(
                transaction, f"{reason} within {transaction.manifest.timeout_seconds:g} s", now, leaving=late
            )
        for replica in late:
            actions += self._remove(replica, f"did not answer epoch {transaction.epoch} in time", now)
        return actions

    def _failed(self, replica: Replica, seat: Seat, report: Report, now: float) -> list[Action]:
        replica.error = report.error
        if seat.step is Step.COMMIT:
            return self._remove(replica, f"could not commit epoch {report.epoch}: {report.error}", now)
        transaction = self._current(report.epoch)
        actions = self._told(replica, self.fleet.release(replica))
        if self.fleet.elsewhere(replica, report.reason):
            return actions + self._dispatch()
        if transaction:
            return actions + self._abort(transaction, f"replica {replica.name}: {report.error}", now)
        # A late joiner whose sources are gone or changing waits for the next version.
        return actions + self.fleet.forget(replica, spared=seat) + self._dispatch()

    def _prepared(self, replica: Replica, seat: Seat, report: Report, now: float) -> list[Action]:
        if seat.step is not Step.PREPARE:
            return []
        transaction = self._current(report.epoch)
        if clash := self._clash(replica, report.epoch, report.fingerprint):
            # A joiner may try another source; in a version under way nobody can tell who is right.
            failure = replace(report, outcome="failed", error=clash, reason="" if transaction else "checksum")
            return self._failed(replica, seat, failure, now)
        seat.step, seat.bytes, seat.transfer_seconds = Step.WAIT, report.bytes, report.transfer_seconds
        _offer(seat, report)
        if transaction:
            transaction.bytes += report.bytes
        if not replica.all_at(Step.WAIT):
            return []
        replica.error = ""
        actions = self._told(replica, self.fleet.release(replica))
        if not transaction:
            actions += self._told(replica, self.fleet.order_commit(replica))
        return actions + self._dispatch() + self._advance(now)

    def _committed(self, replica: Replica, seat: Seat, report: Report, now: float) -> list[Action]:
        if seat.step is not Step.COMMIT:
            raise StaleEpoch(f"replica {replica.name} committed epoch {report.epoch} before it was asked to")
        assert replica.duty is not None
        seat.epoch, seat.version, seat.step = report.epoch, replica.duty.manifest.version, None
        seat.pause_ms, seat.fingerprint = report.pause_ms, report.fingerprint
        _offer(seat, report)
        clash = self._clash(replica, report.epoch, report.fingerprint)
        self.fleet.doubt(replica.name, _fingerprint_of(seat), clash)
        if replica.all_at(None):
            replica.duty = None
        return self._advance(now) + self._dispatch()

    def _advance(self, now: float) -> list[Action]:
        """Moves the current version on when its replicas allow it."""
        transaction, actions = self.current, []
        if transaction and transaction.phase is Phase.PREPARING:
            members = self.fleet.owing(transaction.epoch)
            if not all(member.all_at(Step.WAIT) for member in members) or len(members) < transaction.min_replicas:
                return []
            transaction.phase, transaction.prepared_at = Phase.COMMITTING, now
            transaction.deadline = now + transaction.manifest.timeout_seconds
            self.committed = Committed(transaction.epoch, transaction.manifest, transaction.fingerprint)
            actions.append(self._persist(transaction))
            for member in members:
                actions += self._told(member, self.fleet.order_commit(member))
        if transaction and transaction.phase is Phase.COMMITTING and not self.fleet.owing(transaction.epoch):
            actions += self._end(transaction, Phase.COMMITTED, now)
            actions += self._assign(self.fleet.replicas.values(), now)  # those that came while it was committing
            actions += self._dispatch()
        return actions

    def _abort(
        self, transaction: Transaction, reason: str, now: float, *, leaving: Collection[Replica] = ()
    ) -> list[Action]:
        transaction.error = reason
        told: list[Action] = []
        for member in self.fleet.owing(transaction.epoch):
            told += self.fleet.release(member) + self.fleet.forget(member)
        transaction.control_messages += len(told)
        actions = self._end(transaction, Phase.ABORTED, now) + told
        staying = [replica for replica in self.fleet.replicas.values() if replica not in leaving]
        return actions + self._assign(staying, now) + self._dispatch()

    def _end(self, transaction: Transaction, phase: Phase, now: float) -> list[Action]:
        transaction.phase, transaction.ended_at = phase, now
        action = self._persist(transaction)
        self.current = None
        return [action]

    def _persist(self, transaction: Transaction) -> Persist:
        transaction.control_messages += 1  # its publisher follows the changes
        return Persist(transaction.snapshot())

    def _remove(self, replica: Replica, reason: str, now: float) -> list[Action]:
        involved = self.current is not None and replica.owes(self.current.epoch)
        actions = self._told(replica, self.fleet.release(replica)) + self.fleet.remove(replica, reason)
        return actions + self._dispatch() + (self._advance(now) if involved else [])

    def _target(self) -> Transaction | Committed | None:
        """What a replica without a duty should be brought to."""
        if self.current and self.current.phase is Phase.PREPARING:
            return self.current
        return None if self.current else self.committed

    def _assign(self, replicas: Iterable[Replica], now: float) -> list[Action]:
        """Brings replicas to the target; a version under way has a deadline, late joiners have one of their own."""
        target = self._target()
        if target is None:
            return []
        patience = max(self._rules.join_seconds, target.manifest.timeout_seconds)
        return self.fleet.assign(
            replicas, target, target.deadline if isinstance(target, Transaction) else now + patience
        )

    def _dispatch(self) -> list[Action]:
        current_epoch = self.current.epoch if self.current else 0
        return [action for who, told in self.fleet.dispatch(current_epoch) for action in self._told(who, told)]

    def _told(self, replica: Replica, actions: list[Action]) -> list[Action]:
        if self.current and replica.owes(self.current.epoch):
            self.current.control_messages += len(actions)
        return actions

    def _current(self, epoch: int) -> Transaction | None:
        return self.current if self.current and self.current.epoch == epoch else None


def _offer(seat: Seat, report: Report) -> None:
    """Remembers what others may read of a rank; one that offers nothing is no source."""
    seat.offered_epoch, seat.offers = report.epoch, report.regions


def _fingerprint_of(seat: Seat) -> str:
    return f"fingerprint of rank {seat.rank}"
