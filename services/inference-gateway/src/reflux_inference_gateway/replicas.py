"""The table of replicas: who is there, what it serves, what is in flight on it. Pure; the caller brings the clock."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from reflux_inference_gateway.routing.base import Candidate


class Role(enum.Enum):
    """What a replica computes."""

    BOTH = 1
    PREFILL = 2
    DECODE = 3


class State(enum.Enum):
    """Life of a replica as the gateway sees it."""

    READY = 1
    DRAINING = 2
    LOST = 3


@dataclass(frozen=True, kw_only=True)
class ReplicaInfo:
    """What a replica says about itself, at registration and with each heartbeat."""

    name: str
    model_id: str
    grpc_address: str = ""
    http_url: str = ""
    role: Role = Role.BOTH
    version: int = 0
    epoch: int = 0
    sequences: int = 0
    pending_tokens: int = 0
    capacity: int = 0
    node: str = ""
    run: str = ""
    engine: str = ""
    fault: str = ""
    """Why it must not get requests; empty when it may."""


@dataclass
class ProcessLoad:
    """What is in flight on one process; all models that it serves compute on the same rows."""

    tokens: int = 0
    samples: int = 0


@dataclass
class Replica:
    """One entry: the replica's own words plus what the gateway counts."""

    info: ReplicaInfo
    order: int
    seen_seconds: float
    state: State = State.READY
    load: ProcessLoad = field(default_factory=ProcessLoad)
    """Shared by the entries of one process, which serves several models."""
    inflight_requests: int = 0
    dispatched: int = 0

    @property
    def inflight_tokens(self) -> int:
        """On its process."""
        return self.load.tokens

    @property
    def inflight_samples(self) -> int:
        """On its process."""
        return self.load.samples

    def has_room(self, full_at_capacities: float) -> bool:
        """False with so many times its capacity in flight; 0 times, or a capacity that it did not say, is no limit."""
        limit = full_at_capacities * self.info.capacity
        return not limit or self.inflight_samples < limit

    def version(self) -> int:
        """The weight version that it said last it serves."""
        return self.info.version

    def candidate(self) -> Candidate:
        """The view that routing policies get."""
        return Candidate(
            name=self.info.name,
            inflight_tokens=self.inflight_tokens,
            dispatched=self.dispatched,
            order=self.order,
            version=self.info.version,
            capacity=self.info.capacity,
            inflight_requests=self.inflight_requests,
            location=self.info.node,
        )


@dataclass
class ReplicaTable:
    """Owns all entries. A replica that misses heartbeats is LOST, and forgotten when it stays away for long."""

    expiry_seconds: float = 5.0
    forget_seconds: float = 60.0
    _replicas: dict[str, Replica] = field(default_factory=dict)
    _next_order: int = 0
    _ever_served: set[str] = field(default_factory=set)

    def register(self, info: ReplicaInfo, now_seconds: float) -> Replica:
        """Adds a replica or refreshes its entry; counts of requests in flight survive a second registration."""
        entry = self._replicas.get(info.name)
        if entry is None:
            load = next((one.load for one in self._beside(info)), None) or ProcessLoad()
            entry = Replica(info=info, order=self._next_order, seen_seconds=now_seconds, load=load)
            self._next_order += 1
            self._replicas[info.name] = entry
        entry.info, entry.seen_seconds, entry.state = info, now_seconds, State.READY
        self._ever_served.add(info.model_id)
        return entry

    def heartbeat(self, info: ReplicaInfo, now_seconds: float) -> bool:
        """Refreshes an entry; False when there is none (the gateway restarted), so that the replica registers again.

        A heartbeat also brings a LOST replica back: its connection broke, its process did not. A draining one stays so.
        """
        entry = self._replicas.get(info.name)
        if entry is None or entry.info.model_id != info.model_id:
            return False
        entry.info, entry.seen_seconds = info, now_seconds
        if entry.state is State.LOST:
            entry.state = State.READY
        return True

    def mark_lost(self, name: str) -> None:
        """Takes a replica out of routing until its next heartbeat, after a broken connection."""
        entry = self._replicas.get(name)
        if entry is not None and entry.state is State.READY:
            entry.state = State.LOST

    def drain(self, name: str) -> Replica:
        """Stops new requests to a replica; raises KeyError when there is no such entry."""
        entry = self._replicas[name]
        entry.state = State.DRAINING
        return entry

    def remove(self, name: str) -> None:
        """Forgets a replica."""
        self._replicas.pop(name, None)

    def expire(self, now_seconds: float) -> list[str]:
        """Marks silent replicas LOST, forgets drained and long-silent ones; returns the names whose entry changed."""
        changed = []
        for name, entry in list(self._replicas.items()):
            silent_seconds = now_seconds - entry.seen_seconds
            drained = entry.state is State.DRAINING or silent_seconds > self.forget_seconds
            if drained and entry.inflight_requests == 0:
                del self._replicas[name]
                changed.append(name)
            elif silent_seconds > self.expiry_seconds and entry.state is not State.LOST:
                entry.state = State.LOST
                changed.append(name)
        return changed

    def silent(self, since_seconds: float) -> list[str]:
        """Names of replicas that were not heard since a moment of the clock."""
        return [name for name, entry in self._replicas.items() if entry.seen_seconds < since_seconds]

    def dispatched(self, name: str, num_tokens: int, num_samples: int = 1) -> None:
        """Counts a request from the moment it is sent."""
        entry = self._replicas[name]
        entry.load.tokens += num_tokens
        entry.load.samples += num_samples
        entry.inflight_requests += 1
        entry.dispatched += 1

    def answered(self, name: str, num_tokens: int, num_samples: int = 1) -> None:
        """Takes off what is left of a request; harmless when the entry was forgotten meanwhile."""
        entry = self._replicas.get(name)
        if entry is not None:
            entry.inflight_requests -= 1
            self.lighten(name, num_tokens, num_samples)

    def lighten(self, name: str, num_tokens: int, num_samples: int) -> None:
        """Takes off a part of a request that goes on."""
        if (entry := self._replicas.get(name)) is not None:
            entry.load.tokens -= num_tokens
            entry.load.samples -= num_samples

    def models_beside(self, info: ReplicaInfo) -> list[str]:
        """Models that the process of a replica serves, its own first."""
        return list(dict.fromkeys([info.model_id, *(one.info.model_id for one in self._beside(info))]))

    def _beside(self, info: ReplicaInfo) -> list[Replica]:
        """Entries of the same process, which has one gRPC address."""
        return [
            one for one in self._replicas.values() if info.grpc_address and one.info.grpc_address == info.grpc_address
        ]

    def get(self, name: str) -> Replica | None:
        """One entry, or None."""
        return self._replicas.get(name)

    def entries(self, model_id: str = "") -> list[Replica]:
        """Entries in order of registration; of one model, or all."""
        return [entry for entry in self._replicas.values() if model_id in ("", entry.info.model_id)]

    def models(self) -> list[str]:
        """Models with an entry, in order of first registration."""
        return list(dict.fromkeys(entry.info.model_id for entry in self._replicas.values()))

    def faults(self, model_id: str) -> list[str]:
        """Why replicas of a model are left out although they are there, by name."""
        return [f"{entry.info.name}: {entry.info.fault}" for entry in self.entries(model_id) if entry.info.fault]

    def ever_served(self, model_id: str) -> bool:
        """True when a replica of the model registered since the start, forgotten ones included."""
        return model_id in self._ever_served

    def newest_version(self, model_id: str) -> int:
        """The newest weight version of a model on a replica that is heard; 0 when there is none."""
        heard = (entry for entry in self.entries(model_id) if entry.state is not State.LOST)
        return max((entry.info.version for entry in heard), default=0)

    def oldest_version(self, model_id: str) -> int | None:
        """The oldest weight version of a model on a replica that is known; None when there is none."""
        return min((entry.info.version for entry in self.entries(model_id)), default=None)

    def syncing(self, model_id: str) -> bool:
        """True while replicas of a model that are heard serve different versions: new weights are on their way."""
        return len({entry.info.version for entry in self.entries(model_id) if entry.state is not State.LOST}) > 1

    def with_room(self, model_id: str, full_at_capacities: float) -> bool:
        """True when a healthy replica of the model is not full."""
        return any(entry.has_room(full_at_capacities) for entry in self.routable(model_id))

    def prefilling(self, model_id: str) -> list[Replica]:
        """Healthy entries that compute prompts for others."""
        return [
            entry
            for entry in self.entries(model_id)
            if entry.state is State.READY and entry.info.role is Role.PREFILL and not entry.info.fault
        ]

    def routable(
        self,
        model_id: str,
        *,
        min_version: int = 0,
        version: int | None = None,
        excluded: Iterable[str] = (),
        http: bool = False,
    ) -> list[Replica]:
        """Healthy entries that may take a request now, none of role prefill; `http`: with an OpenAI-compatible door."""
        return [
            entry
            for entry in self.entries(model_id)
            if entry.state is State.READY
            and entry.info.role is not Role.PREFILL
            and not entry.info.fault
            and entry.info.version >= min_version
            and version in (None, entry.info.version)
            and entry.info.name not in excluded
            and (entry.info.http_url or not http)
        ]


def stored(entry: Replica) -> ReplicaInfo:
    """A copy of the entry's info that later heartbeats do not change."""
    return replace(entry.info)
