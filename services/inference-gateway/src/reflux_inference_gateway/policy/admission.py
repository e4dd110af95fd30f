"""Who waits for a replica, and who goes next: a bounded queue, fair between tenants by weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reflux_inference_gateway.policy.waiting_line import Entry, Rank, WaitingLine


@dataclass
class _Tenant:
    weight: float
    finish: float = 0.0
    """Virtual time at which what it was given is worked off."""
    begun: WaitingLine = field(default_factory=WaitingLine)
    new_groups: WaitingLine = field(default_factory=WaitingLine)

    def __len__(self) -> int:
        return len(self.begun) + len(self.new_groups)

    def line(self, entry: Entry) -> WaitingLine:
        return self.new_groups if entry.is_new_group else self.begun

    def next_line(self, hold_new_groups: bool) -> WaitingLine | None:
        """The line whose head goes first; None when none may go."""
        lines = (self.begun,) if hold_new_groups else (self.begun, self.new_groups)
        heads = [(head, line) for line in lines if (head := line.head()) is not None]
        return min(heads, key=lambda one: one[0])[1] if heads else None

    def last(self) -> tuple[Rank, Entry]:
        return max((one for line in (self.begun, self.new_groups) if (one := line.last())), key=lambda one: one[0])


class Admission:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996) between tenants; priority, deadline, arrival within one.

    A tenant's start tag is max(virtual time, its last finish tag), its finish tag start + cost / weight; the smallest
    start tag goes next and becomes the virtual time. While two tenants both wait, what they got per weight differs by
    at most the largest request of each per weight. When the queue is full, the least urgent and newest entry
    of the tenant with most entries per weight makes room: a flood turns away its own requests (longest queue drop:
    Suter, Lakshman, Stiliadis, Choudhury 1998).
    """

    def __init__(self, max_entries: int, weights: Mapping[str, float] | None = None) -> None:
        """Tenants without a weight have 1."""
        if max_entries < 1 or any(weight <= 0 for weight in (weights or {}).values()):
            raise ValueError("a queue needs room for one entry, and tenants weights above 0")
        self._max_entries = max_entries
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, Entry] = {}
        self._virtual_time = 0.0
        self._arrivals = 0
        self.hold_new_groups = False
        """Set by an outside signal: the depth of the reward queue."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, entry: Entry) -> Entry | None:
        """Queues an entry; returns the one, perhaps itself, that is turned away for it when the queue is full."""
        if entry.key in self._waiting:
            raise ValueError(f"{entry.key!r} waits already")
        if entry.tenant not in self._tenants:
            self._tenants[entry.tenant] = _Tenant(self._weights.get(entry.tenant, 1.0))
        self._tenants[entry.tenant].line(entry).push(entry, self._arrivals)
        self._arrivals += 1
        self._waiting[entry.key] = entry
        if len(self._waiting) <= self._max_entries:
            return None
        refused = max(self._tenants.values(), key=lambda one: len(one) / one.weight).last()[1]
        self.cancel(refused.key)
        return refused

    def cancel(self, key: str) -> bool:
        """Takes an entry out; False when it does not wait any more."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._tenants[entry.tenant].line(entry).remove(key)
            self._settle()
        return entry is not None

    def expired(self, now: float) -> list[Entry]:
        """Takes out all entries whose deadline has passed."""
        late = [entry for entry in self._waiting.values() if entry.deadline <= now]
        for entry in late:
            self.cancel(entry.key)
        return late

    def take(self) -> Entry | None:
        """Takes out the entry that goes next; None when nobody waits who may go."""
        ready = [
            (max(self._virtual_time, tenant.finish), name, line)
            for name, tenant in self._tenants.items()
            if (line := tenant.next_line(self.hold_new_groups)) is not None
        ]
        if not ready:
            return None
        start, name, line = min(ready, key=lambda one: one[:2])
        entry = line.pop()
        del self._waiting[entry.key]
        self._virtual_time = start
        self._tenants[name].finish = start + entry.cost / self._tenants[name].weight
        self._settle()
        return entry

    def _settle(self) -> None:
        """Forgets who neither waits nor owes; when nobody waits, all debts, and the smallest ones of too many."""
        owing = [one for one in self._tenants.items() if not len(one[1])]
        keep = self._max_entries if self._waiting else 0
        owing.sort(key=lambda one: one[1].finish, reverse=True)
        for at, (name, tenant) in enumerate(owing):
            if at >= keep or tenant.finish <= self._virtual_time:
                del self._tenants[name]
