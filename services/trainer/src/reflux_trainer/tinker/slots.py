"""Which replica of a base serves which sampler's weights: residence, reuse, and whose turn it is. Pure but for time."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Slot:
    """One replica: the weights that it serves and how many calls use them."""

    index: int
    target: str = ""
    """Whose weights: a key of stored weights, an inflight model, or the base."""
    weights: str = ""
    """Key of the weights that it really holds; an inflight target changes them."""
    version: int = -1
    """Version under which they were published; -1 before the first publish."""
    source: str = ""
    """Learner process that published them."""
    users: int = 0
    loading: bool = False
    used_at: float = 0.0


@dataclass
class SlotTable:
    """Owns the slots of one base and the queue of targets that wait for one.

    A target that has a slot keeps it while it is used, but once others have waited for `slice_seconds` it takes no new
    calls, so that its slot becomes free: nobody waits for ever.
    """

    slots: list[Slot]
    slice_seconds: float
    waiting: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Targets without a slot, by the time since when; the oldest one is served first."""
    _queued: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def queued(self, target: str) -> Iterator[None]:
        """Around all attempts of one call to take a slot: a target that nobody waits for is in nobody's way."""
        self._queued[target] += 1
        try:
            yield
        finally:
            self._queued[target] -= 1
            if not self._queued[target]:
                del self._queued[target]
                self.waiting.pop(target, None)

    def resident(self, target: str) -> Slot | None:
        """The slot of a target, if it has one."""
        return next((slot for slot in self.slots if slot.target == target and slot.version >= 0), None)

    def take(self, target: str, now: float) -> Slot | None:
        """A slot for one call, counted as used, or None: wait, ask again. One of other weights is `loading` first."""
        slot = self.resident(target)
        if slot is not None:
            if slot.users and not slot.loading and self._others_starve(target, now):
                self.waiting.setdefault(target, now)
                return None
        else:
            slot = self._free(target, now)
            if slot is None:
                self.waiting.setdefault(target, now)
                return None
            slot.target, slot.weights, slot.version, slot.loading = target, "", 0, True
        self.waiting.pop(target, None)
        slot.users += 1
        slot.used_at = now
        return slot

    def give_back(self, slot: Slot, now: float) -> None:
        """Ends one call's use."""
        slot.users -= 1
        slot.used_at = now

    def hold(self, slot: Slot, target: str, weights: str, version: int, source: str = "") -> None:
        """A publish has ended; `version` 0 when it failed: what the slot holds is not known then."""
        slot.loading = False
        if version:
            slot.target, slot.weights, slot.version, slot.source = target, weights, version, source
        else:
            self.forget(slot)

    def forget(self, slot: Slot) -> None:
        """What the slot holds is not known any more."""
        slot.target, slot.weights, slot.version, slot.loading = "", "", -1, False

    def _others_starve(self, target: str, now: float) -> bool:
        return any(now - since > self.slice_seconds for other, since in self.waiting.items() if other != target)

    def _free(self, target: str, now: float) -> Slot | None:
        """The idle slot that was not used for longest, if it is this target's turn."""
        ahead = [
            other for other, since in self.waiting.items() if other != target and since < self.waiting.get(target, now)
        ]
        idle = sorted(
            (slot for slot in self.slots if not slot.users), key=lambda slot: (slot.version >= 0, slot.used_at)
        )
        return idle[len(ahead)] if len(idle) > len(ahead) else None
