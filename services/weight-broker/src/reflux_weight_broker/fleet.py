"""The replicas of one model, their ranks, and what each of them owes. Pure."""

from collections.abc import Iterable, Iterator

from reflux_weight_broker import sources
from reflux_weight_broker.actions import Abort, Action, Commit, Dismiss, Lease, Prepare
from reflux_weight_broker.records import PUBLISHER, Committed, Duty, Registration, Replica, Seat, Step, Transaction
from reflux_weight_broker.refusals import UnknownReplica

_SOURCES = 3
_ELSEWHERE = ("generation_gone", "peer_gone", "checksum")
"""Failures that say something about the source rather than about the reader."""


class Fleet:
    """All replicas by name. `readers_per_source` bounds who reads from one source at a time, 0 does not."""

    def __init__(self, readers_per_source: int) -> None:
        self.replicas: dict[str, Replica] = {}
        self._limit = readers_per_source

    def known(self, claim: Registration) -> tuple[Replica, Seat] | None:
        """The replica and the rank when this very process has registered before."""
        replica = self.replicas.get(claim.replica)
        seat = replica.seats.get(claim.rank) if replica else None
        if replica and seat and seat.incarnation == claim.incarnation and replica.tensors.hash == claim.tensors.hash:
            return replica, seat
        return None

    def replaced_by(self, claim: Registration) -> Replica | None:
        """The replica that cannot stay when this rank registers: its rank is taken, or it has another layout."""
        replica = self.replicas.get(claim.replica)
        if replica and (claim.rank in replica.seats or replica.tensors.hash != claim.tensors.hash):
            return replica
        return None

    def add(self, claim: Registration, now: float) -> tuple[Replica, Seat]:
        """Adds a rank that does not listen yet, and its replica with the first one."""
        replica = self.replicas.setdefault(claim.replica, Replica(claim.replica, claim.tensors))
        seat = replica.seats[claim.rank] = Seat(claim.rank, claim.incarnation, claim.mode, lost_at=now)
        return replica, seat

    def remove(self, replica: Replica, reason: str) -> list[Action]:
        """Takes a replica out; all its ranks have to register again."""
        replica.error = replica.error or reason
        del self.replicas[replica.name]
        return [Dismiss(replica.name, seat.incarnation, reason) for seat in replica.seats.values()]

    def named(self, name: str) -> Replica:
        """Raises `UnknownReplica`."""
        if name not in self.replicas:
            raise UnknownReplica(f"replica {name} is not registered")
        return self.replicas[name]

    def find(self, name: str, incarnation: str, rank: int = 0) -> tuple[Replica, Seat]:
        """A replica and the rank of an incarnation; without one that of `rank`. Raises `UnknownReplica`."""
        replica = self.replicas.get(name)
        for seat in replica.seats.values() if replica else ():
            if seat.incarnation == incarnation or (not incarnation and seat.rank == rank):
                assert replica is not None
                return replica, seat
        raise UnknownReplica(f"replica {name} is not registered with this incarnation: register again")

    def lost(self, name: str, incarnation: str, now: float) -> None:
        """A rank does not listen any more; unknown ones are ignored."""
        replica = self.replicas.get(name)
        for seat in replica.seats.values() if replica else ():
            if seat.incarnation == incarnation and seat.lost_at is None:
                seat.lost_at = now

    def away(self, since: float) -> list[Replica]:
        """Replicas of which a rank has not listened since then."""
        found = self.replicas.values()
        return [r for r in found if any(s.lost_at is not None and s.lost_at < since for s in r.seats.values())]

    def owing(self, epoch: int) -> list[Replica]:
        """Replicas that take part in an epoch and have not committed it yet."""
        return [replica for replica in self.replicas.values() if replica.owes(epoch)]

    def overdue(self, now: float) -> list[Replica]:
        """Replicas that should have prepared or committed by now."""
        return [r for r in self.replicas.values() if r.duty and now > r.duty.deadline and not r.at(Step.QUEUE)]

    def doubt(self, name: str, cause: str, reason: str) -> None:
        """Remembers why a replica is not to be trusted; no reason takes a former one back."""
        replica = self.replicas.get(name)
        if replica and reason:
            replica.doubts[cause] = reason
        elif replica:
            replica.doubts.pop(cause, None)

    def assign(self, replicas: Iterable[Replica], target: Transaction | Committed, deadline: float) -> list[Action]:
        """Gives replicas the duty to reach a version, in place of what they owed, unless they have reached it."""
        manifest, ended = target.manifest, list[Action]()
        for replica in replicas:
            if not replica.complete or replica.epoch == target.epoch or replica.owes(target.epoch):
                continue
            if isinstance(target, Transaction):
                target.members[replica.name] = replica
            ended += self.release(replica)
            replica.duty = Duty(target.epoch, manifest, deadline, replica.epoch == manifest.base_epoch)
            for seat in replica.seats.values():
                seat.step = Step.QUEUE
        return ended

    def dispatch(self, current_epoch: int) -> Iterator[tuple[Replica, list[Action]]]:
        """Finds sources for those who wait for one: who is told what. Readers of `current_epoch` need no lease."""
        waiting = [replica for replica in self.replicas.values() if replica.duty and replica.duty.source is None]
        if not waiting:
            return
        readers, peers = sources.count(self.replicas.values()), {}
        for replica in waiting:
            duty = replica.duty
            assert duty is not None
            if duty.epoch not in peers:
                peers[duty.epoch] = sources.peers(duty.epoch, duty.manifest, self.replicas.values())
            found = sources.for_reader(replica, duty, peers[duty.epoch])
            duty.source = sources.choose(found, readers, self._limit)
            if duty.source is None:
                continue
            readers[duty.source.name] += 1
            replica.source = duty.source.name
            queued = [seat for seat in replica.seats.values() if seat.step is Step.QUEUE]
            for seat in queued:
                seat.step = Step.PREPARE
            duty.leased = duty.source.name != PUBLISHER or duty.epoch != current_epoch
            leases = self._leases(replica, duty.deadline) if duty.leased else []
            yield replica, leases + self.remind(replica, queued)

    def remind(self, replica: Replica, seats: Iterable[Seat]) -> list[Action]:
        """What ranks owe, for those that listen."""
        duty, actions = replica.duty, list[Action]()
        for seat in seats if duty else ():
            assert duty is not None
            if seat.lost_at is not None:
                continue
            if seat.step is Step.PREPARE and duty.source:
                order = (duty.epoch, duty.manifest, duty.source, duty.deadline)
                actions.append(Prepare(replica.name, seat.incarnation, *order))
            elif seat.step is Step.COMMIT:
                actions.append(Commit(replica.name, seat.incarnation, duty.epoch, duty.manifest))
        return actions

    def order_commit(self, replica: Replica) -> list[Action]:
        """All ranks of a replica are to serve what they have prepared."""
        for seat in replica.seats.values():
            seat.step = Step.COMMIT
        return self.remind(replica, replica.seats.values())

    def elsewhere(self, replica: Replica, reason: str) -> bool:
        """Queues a reader again when something else than what failed is left to try; False when there is nothing.

        Instead of a delta that is the whole version, instead of a source at fault another one, at most three of them.
        """
        duty = replica.duty
        if duty is None or duty.source is None:
            return False
        if reason == "base_mismatch" and duty.source.kind == "delta":
            duty.base_served = False
        elif reason in _ELSEWHERE:
            duty.tried.add(duty.source.name)
            peers = sources.peers(duty.epoch, duty.manifest, self.replicas.values())
            if len(duty.tried) >= _SOURCES or not sources.for_reader(replica, duty, peers):
                return False
        else:
            return False
        duty.source = None
        for seat in replica.seats.values():
            seat.step = Step.WAIT if seat.step is Step.WAIT else Step.QUEUE
        return True

    def forget(self, replica: Replica, spared: Seat | None = None) -> list[Action]:
        """Ends a replica's duty and tells its ranks, but for one that knows."""
        duty, actions = replica.duty, list[Action]()
        replica.duty = None
        for seat in replica.seats.values():
            if duty and seat is not spared and seat.lost_at is None and seat.step not in (None, Step.QUEUE):
                actions.append(Abort(replica.name, seat.incarnation, duty.epoch, duty.manifest.version))
            seat.step = None
        return actions

    def release(self, replica: Replica) -> list[Action]:
        """Ends the leases that were taken for a reader."""
        if replica.duty is None or not replica.duty.leased:
            return []
        replica.duty.leased = False
        return self._leases(replica, 0.0)

    def leases(self, owner: str) -> list[Action]:
        """All leases on an owner's memory, for one that begins to listen."""
        found = list[Action]()
        for reader in self.replicas.values():
            if reader.duty and reader.duty.leased and reader.duty.source and reader.duty.source.name == owner:
                found += self._leases(reader, reader.duty.deadline)
        return found

    def _leases(self, replica: Replica, deadline: float) -> list[Action]:
        assert replica.duty is not None
        assert replica.duty.source is not None
        source = replica.duty.source
        generations = sorted({region.generation for region in source.regions})
        return [Lease(source.name, generation, replica.name, deadline) for generation in generations]
