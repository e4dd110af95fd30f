"""The state machine under replicas, ranks, publishers, probes and time in any order: what must hold always."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machine_steps import SHARDED, TENSORS, offer

from reflux_transfer.client.offer import SourceRegion
from reflux_weight_broker.actions import Abort, Action, Commit, Dismiss, Lease, Persist, Prepare
from reflux_weight_broker.records import PUBLISHER, Phase, Registration, Report, Rules, Step
from reflux_weight_broker.refusals import StaleEpoch, UnknownReplica
from reflux_weight_broker.versions import ModelVersions

REPLICAS = {"a": TENSORS, "b": TENSORS, "g": SHARDED}


class AnyOrder(RuleBasedStateMachine):
    """`served` is what the processes really serve; the machine only knows what they say."""

    seats = st.sampled_from([("a", 0), ("b", 0), ("g", 0), ("g", 1)])

    def __init__(self) -> None:
        super().__init__()
        self.versions = ModelVersions("m", Rules(reconnect_seconds=2.0, join_seconds=4.0, readers_per_source=1))
        self.now = 0.0
        self.begun: set[int] = set()
        self.decided: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.asked: dict[tuple[str, str], set[int]] = {}
        self.served: dict[tuple[str, int], tuple[str, int]] = {}
        self.leases: dict[tuple[str, int, str], float] = {}

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.stored(action)
            elif isinstance(action, Commit):
                assert action.epoch in self.decided, "COMMIT was sent before the decision was stored"
                self.asked.setdefault((action.replica, action.incarnation), set()).add(action.epoch)
            elif isinstance(action, Lease):
                key = (action.owner, action.generation, action.holder)
                assert (action.deadline > 0) != (key in self.leases), "a lease ends once, after it began"
                self.leases.pop(key, None)
                if action.deadline:
                    self.leases[key] = action.deadline
            elif isinstance(action, Prepare):
                if action.source.name != PUBLISHER:
                    assert self.holds(action.source.name, action.epoch), "a source that does not hold the epoch"
                    held = {(owner, holder) for owner, _, holder in self.leases}
                    assert (action.source.name, action.replica) in held, "nobody told the source before the reader"
            else:
                assert isinstance(action, Abort | Dismiss)

    def stored(self, action: Persist) -> None:
        phase, epoch = action.transaction.phase, action.transaction.epoch
        if phase is Phase.COMMITTING:
            assert epoch not in self.aborted
            self.decided[epoch] = action.transaction.manifest.version
        if phase is Phase.ABORTED:
            assert epoch not in self.decided, "a decided version was aborted"
            self.aborted.add(epoch)

    def holds(self, name: str, epoch: int) -> bool:
        replica = self.versions.fleet.replicas.get(name)
        return replica is not None and bool(replica.offers(epoch))

    @rule(seat=seats, incarnation=st.sampled_from("12"), listens=st.booleans())
    def joins(self, seat: tuple[str, int], incarnation: str, listens: bool) -> None:
        name, rank = seat
        process = f"{incarnation}/{rank}"
        if self.served.get(seat, ("", 0))[0] != process:
            self.served[seat] = (process, 0)
        epoch = self.served[seat][1]
        claim = Registration(name, process, REPLICAS[name], rank, epoch=epoch, version=epoch, fingerprint=epoch)
        self.take(self.versions.register(claim, self.now))
        if listens:
            self.take(self.versions.connected(name, process))

    @rule(seat=seats)
    def drops(self, seat: tuple[str, int]) -> None:
        self.versions.fleet.lost(seat[0], self.served.get(seat, ("", 0))[0], self.now)

    @rule(minimum=st.integers(0, 3), delta=st.booleans())
    def begins(self, minimum: int, delta: bool) -> None:
        epoch = version = self.versions.last_epoch + 1
        base = self.versions.committed.epoch if self.versions.committed else 0
        manifest = offer(version, timeout_seconds=5.0, kind="delta" if delta else "full", base_epoch=base)
        self.versions.check_begin(manifest, self.versions.last_epoch, replay=False)
        assert epoch not in self.begun, "an epoch repeats"
        self.begun.add(epoch)
        self.take(self.versions.begin(manifest, epoch, min_replicas=minimum, now=self.now)[1])

    @precondition(lambda self: self.versions.last_epoch)
    @rule(
        seat=seats,
        outcome=st.sampled_from(["prepared", "prepared", "committed", "committed", "failed"]),
        back=st.sampled_from([0, 0, 0, 1]),
        reason=st.sampled_from(["", "peer_gone", "checksum", "base_mismatch"]),
        right=st.sampled_from([True, True, True, False]),
        serves=st.booleans(),
    )
    def answers(self, seat: tuple[str, int], outcome: str, back: int, reason: str, right: bool, serves: bool) -> None:
        epoch = self.versions.last_epoch - back
        name, rank = seat
        process = self.served.get(seat, ("", 0))[0]
        if outcome == "committed" and epoch not in self.asked.get((name, process), set()):
            return  # a replica swaps only when it was asked
        regions = (SourceRegion(rank, b"x", "shm", epoch),) if serves and outcome != "failed" else ()
        fingerprint = epoch if right or outcome == "committed" else epoch + 1000
        fields = {"error": "x", "reason": reason, "fingerprint": fingerprint, "regions": regions}
        try:
            actions = self.versions.report(Report(name, process, epoch, outcome, rank, **fields), self.now)
        except (StaleEpoch, UnknownReplica):
            return
        if outcome == "committed":
            self.served[seat] = (process, epoch)
        self.take(actions)

    @rule(name=st.sampled_from(["", *REPLICAS]), logprob=st.sampled_from([0.0, 1.0]), back=st.sampled_from([0, 1]))
    def probes(self, name: str, logprob: float, back: int) -> None:
        try:
            self.versions.probe(self.versions.last_epoch - back, name, [logprob])
        except (StaleEpoch, UnknownReplica):
            return

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.versions.tick(self.now))

    @invariant()
    def no_replica_is_routable_with_an_unknown_version(self) -> None:
        for replica in self.versions.fleet.replicas.values():
            if replica.unhealthy:
                continue
            for rank in replica.seats:
                known = self.served[(replica.name, rank)][1]
                assert replica.epoch == known or replica.at(Step.COMMIT), (replica.name, replica.epoch, known)
            assert replica.epoch == 0 or self.decided[replica.epoch] == replica.version

    @invariant()
    def nobody_serves_an_undecided_version(self) -> None:
        for _, epoch in self.served.values():
            assert epoch == 0 or epoch in self.decided
            assert epoch not in self.aborted

    @invariant()
    def a_version_under_way_always_ends(self) -> None:
        current = self.versions.current
        assert current is None or self.now <= current.deadline

    @invariant()
    def the_committed_version_is_the_last_decided_one(self) -> None:
        if self.decided:
            assert self.versions.committed.epoch == max(self.decided)

    @invariant()
    def leases_are_those_of_readers(self) -> None:
        reading = {r.name for r in self.versions.fleet.replicas.values() if r.duty and r.duty.leased}
        assert {holder for _, _, holder in self.leases} == reading

    @invariant()
    def nobody_has_more_readers_than_the_limit(self) -> None:
        replicas = self.versions.fleet.replicas.values()
        sources = [r.duty.source.name for r in replicas if r.duty and r.duty.source and r.at(Step.PREPARE)]
        assert max((sources.count(name) for name in sources), default=-math.inf) <= 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
