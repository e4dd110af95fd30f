"""Owns what every queue holds, against its limit and its guarantee; use counts for all queues above.

Borrowing works inside a cohort, the queues below one parent: a queue may go above its guarantee up to its limit on room
that its siblings leave idle. A sibling takes its guarantee back by preemption, so what cannot be preempted borrows only
room that is guaranteed to nobody (as in Run:ai and KAI, where such work stays inside the quota).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reflux_placement.errors import InvalidQueue
from reflux_placement.policy.view import Queue
from reflux_placement.topology import Resources

Row = tuple[int, int, int]
Promised = Mapping[str, Row]
"""By queue, its whole subtree: what asks that are first in line will hold."""

NOTHING_PROMISED: Promised = {}
_NAMES = ("GPUs", "CPUs", "GiB of memory")
_UNITS = (1, 1000, 1 << 30)


@dataclass(frozen=True, slots=True)
class Excess:
    """A bound that an ask would break. `over` is what would have to be given up below `queue`; all zero if what is
    given up there would be for others first, or no help."""

    queue: str
    over: Row
    sentence: str


class Ledger:
    """Use per queue. A queue that nobody described has weight 1, no guarantee and no limit."""

    def __init__(self, queues: Mapping[str, Queue], capacity: Resources) -> None:
        self.capacity: Row = capacity.row
        self._queues = dict(queues)
        self._children: dict[str, list[str]] = {}
        for queue in queues.values():
            self._children.setdefault(queue.parent, []).append(queue.name)
        self._paths: dict[str, tuple[Queue, ...]] = {}
        self.used: dict[str, list[int]] = {}
        self._firm: dict[str, list[int]] = {}
        self.has_limits = any(queue.limit is not None for queue in queues.values())
        self.has_guarantees = any(any(queue.guaranteed.row) for queue in queues.values())

    def path(self, queue: str) -> tuple[Queue, ...]:
        """The queue and those above it, lowest first. Raises InvalidQueue for a tree that loops."""
        path = self._paths.get(queue)
        if path is None:
            links: list[Queue] = []
            name = queue
            while name:
                if any(link.name == name for link in links):
                    raise InvalidQueue(f"queue {queue}", name, "is above itself; give the tree a top")
                links.append(self._queues.get(name) or Queue(name=name))
                name = links[-1].parent
            path = self._paths[queue] = tuple(links)
            for link in path:
                self.used.setdefault(link.name, [0, 0, 0])
                self._firm.setdefault(link.name, [0, 0, 0])
        return path

    def charge(self, queue: str, amount: Row, *, firm: bool, sign: int = 1) -> None:
        """Counts what a job of the queue holds (sign 1) or gave back (-1). `firm`: it cannot be preempted."""
        for link in self.path(queue):
            for table in (self.used, self._firm) if firm else (self.used,):
                held = table[link.name]
                for kind in range(3):
                    held[kind] += sign * amount[kind]

    def excess(self, queue: str, amount: Row, *, firm: bool, promised: Promised = NOTHING_PROMISED) -> list[Excess]:
        """The bounds that holding `amount` more would break; empty when it may start. `promised` counts as used."""
        broken: list[Excess] = []
        for link in self.path(queue):
            if link.limit is not None:
                ahead = promised.get(link.name, (0, 0, 0))
                if any(_over(link.limit.row, self.used[link.name], amount, ahead)):
                    over = _over(link.limit.row, self.used[link.name], amount, (0, 0, 0))
                    broken.append(Excess(link.name, over, _limit_sentence(link, self.used[link.name], amount, ahead)))
        if firm and self.has_guarantees and not broken:
            broken += self._guarantees_taken(queue, amount)
        return broken

    def could_ever(self, queue: str, amount: Row) -> bool:
        """Whether the limits hold this much when nobody else holds anything."""
        limits = [link.limit.row for link in self.path(queue) if link.limit is not None]
        return not any(any(_over(limit, (0, 0, 0), amount, (0, 0, 0))) for limit in limits)

    def within_guarantee(self, queue: Queue, amount: Row) -> bool:
        """Whether the queue with `amount` more stays inside its guarantee, which covers what the ask is about."""
        guaranteed, used = queue.guaranteed.row, self.used[queue.name]
        if not guaranteed[principal(amount)]:
            return False
        return all(used[k] + amount[k] <= guaranteed[k] for k in range(3) if guaranteed[k] and amount[k])

    def borrows(self, queue: Queue, kind: int, freed: int = 0) -> bool:
        """Whether the queue holds more of a resource than it is guaranteed, after giving up `freed`."""
        return self.used[queue.name][kind] - freed > queue.guaranteed.row[kind] or not queue.guaranteed.row[kind]

    def below_common(self, queue: str, other: str) -> tuple[tuple[Queue, ...], tuple[Queue, ...]]:
        """The parts of two paths below the first queue that both share, lowest first."""
        mine, theirs = self.path(queue), self.path(other)
        shared = {link.name for link in mine} & {link.name for link in theirs}
        return (
            tuple(link for link in mine if link.name not in shared),
            tuple(link for link in theirs if link.name not in shared),
        )

    def _guarantees_taken(self, queue: str, amount: Row) -> Iterable[Excess]:
        """Room that is guaranteed to others and that work which cannot be preempted would take for good."""
        cap = self.capacity
        for link in reversed(self.path(queue)):
            siblings = [self.path(name)[0] for name in self._children.get(link.parent, ())]
            for kind in range(3):
                firm = self._firm[link.name][kind] + amount[kind]
                others = [s for s in siblings if s.name != link.name]
                if not amount[kind] or firm <= link.guaranteed.row[kind]:
                    continue
                if not any(sibling.guaranteed.row[kind] for sibling in others):
                    continue
                promised = sum(max(self._firm[s.name][kind], s.guaranteed.row[kind]) for s in others)
                if firm + promised > cap[kind]:
                    yield Excess(link.name, (0, 0, 0), _firm_sentence(link, kind, promised, cap[kind]))
            if link.limit is not None:
                cap = tuple(min(c, bound) if bound else c for c, bound in zip(cap, link.limit.row, strict=True))


def principal(amount: Row) -> int:
    """Position of the resource that an ask is about: GPUs if it wants any, else CPUs, else memory."""
    return 0 if amount[0] else 1 if amount[1] else 2


def check_queues(queues: Mapping[str, Queue], capacity: Resources) -> None:
    """Refuses a tree of queues that promises more than there is. Raises InvalidQueue."""
    ledger = Ledger(queues, capacity)
    for key, queue in queues.items():
        if key != queue.name or not queue.name:
            raise InvalidQueue("queue", key, f"is listed under another name than its own, {queue.name!r}")
        if queue.parent and queue.parent not in queues:
            raise InvalidQueue(f"queue {key}.parent", queue.parent, f"does not exist; there are {', '.join(queues)}")
        if not queue.weight > 0:
            raise InvalidQueue(f"queue {key}.weight", queue.weight, "must be above zero")
        ledger.path(key)
        if queue.limit is not None and not _within(queue.guaranteed.row, queue.limit.row):
            raise InvalidQueue(f"queue {key}.guaranteed", queue.guaranteed, f"is above its limit {queue.limit}")
    for parent in {queue.parent for queue in queues.values()}:
        promised = Resources()
        for queue in queues.values():
            promised = promised + queue.guaranteed if queue.parent == parent else promised
        owned = queues[parent].guaranteed if parent and any(queues[parent].guaranteed.row) else capacity
        if not _within(promised.row, owned.row):
            what = f"queue {parent}" if parent else "the cluster"
            names = ", ".join(
                queue.name for queue in queues.values() if queue.parent == parent and any(queue.guaranteed.row)
            )
            raise InvalidQueue(
                f"guaranteed of {names}", promised, f"the queues of {what} are promised more than its {owned}"
            )


def _within(amount: Row, bound: Row) -> bool:
    """Bounds of zero CPUs or memory bound nothing."""
    return amount[0] <= bound[0] and all(amount[k] <= bound[k] or not bound[k] for k in (1, 2))


def _over(limit: Row, used: Sequence[int], amount: Row, ahead: Row) -> Row:
    """What `used`, `ahead` and `amount` together exceed the limit by, in resources that the amount has any of."""
    gpus, millicpus, memory_bytes = (
        max(0, used[kind] + ahead[kind] + amount[kind] - limit[kind])
        if amount[kind] and (limit[kind] or not kind)
        else 0
        for kind in range(3)
    )
    return (gpus, millicpus, memory_bytes)


def _limit_sentence(queue: Queue, used: Sequence[int], amount: Row, ahead: Row) -> str:
    assert queue.limit is not None
    over = _over(queue.limit.row, used, amount, ahead)
    kind = next(k for k in range(3) if over[k])
    held, wanted, limit, first = (_count(row, kind) for row in (used, amount, queue.limit.row, ahead))
    waiting = f", {first} more are promised to older jobs" if ahead[kind] else ""
    return f"queue {queue.name} holds {held} of its limit of {limit} {_NAMES[kind]}{waiting}; this job needs {wanted}"


def _firm_sentence(queue: Queue, kind: int, promised: int, cap: int) -> str:
    free, total = ((value / _UNITS[kind]) for value in (cap - promised, cap))
    return (
        f"it cannot be preempted, and only {max(0, free):g} of {total:g} {_NAMES[kind]} may go to such jobs of queue "
        f"{queue.name}; the others are guaranteed to its siblings"
    )


def _count(row: Sequence[int], kind: int) -> str:
    return f"{row[kind] / _UNITS[kind]:g}"
