"""Who waits for a replica, and who goes next: a bounded queue, fair between tenants by weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reflux_inference_gateway.policy.waiting_line import Entry, WaitingLine


@dataclass
class _Tenant:
    weight: float
    finish: float = 0.0
    """Virtual time at which what it was given is worked off."""
    line: WaitingLine = field(default_factory=WaitingLine)


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

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, entry: Entry) -> Entry | None:
        """Queues an entry; returns the one, perhaps itself, that is turned away for it when the queue is full."""
        if entry.key in self._waiting:
            raise ValueError(f"{entry.key!r} waits already")
        self._tenant(entry).line.push(entry)
        self._waiting[entry.key] = entry
        if len(self._waiting) <= self._max_entries:
            return None
        refused = max(self._tenants.values(), key=lambda one: len(one.line) / one.weight).line.last()
        self.cancel(refused.key)
        return refused

    def cancel(self, key: str) -> bool:
        """Takes an entry out; False when it does not wait any more."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._tenants[entry.tenant].line.remove(key)
            self._settle()
        return entry is not None

    def take(self) -> Entry | None:
        """Takes out the entry that goes next; None when nobody waits."""
        if not self._waiting:
            return None
        waiting = [(max(self._virtual_time, one.finish), name) for name, one in self._tenants.items() if len(one.line)]
        start, name = min(waiting)
        tenant = self._tenants[name]
        entry = tenant.line.pop()
        del self._waiting[entry.key]
        self._virtual_time = start
        tenant.finish = start + entry.cost / tenant.weight
        self._settle()
        return entry

    def give_back(self, entry: Entry) -> None:
        """Puts what was just taken back to its place: it could not go, and its tenant owes nothing for it."""
        tenant = self._tenant(entry)
        tenant.finish = max(0.0, tenant.finish - entry.cost / tenant.weight)
        tenant.line.push(entry)
        self._waiting[entry.key] = entry

    def _tenant(self, entry: Entry) -> _Tenant:
        if entry.tenant not in self._tenants:
            self._tenants[entry.tenant] = _Tenant(self._weights.get(entry.tenant, 1.0))
        return self._tenants[entry.tenant]

    def _settle(self) -> None:
        """Forgets who neither waits nor owes; when nobody waits, all debts, and the smallest ones of too many."""
        owing = [one for one in self._tenants.items() if not len(one[1].line)]
        keep = self._max_entries if self._waiting else 0
        owing.sort(key=lambda one: one[1].finish, reverse=True)
        for at, (name, tenant) in enumerate(owing):
            if at >= keep or tenant.finish <= self._virtual_time:
                del self._tenants[name]
