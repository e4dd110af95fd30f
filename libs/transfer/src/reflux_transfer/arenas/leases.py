"""Owns who may still read one arena, and until when."""


class Leases:
    """Holders by name, each until a monotonic time. For one thread at a time: arenas have a lock of their own."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def grant(self, holder: str, end: float) -> None:
        """Lets a holder read until `end`, whatever it had before."""
        self._ends[holder] = end

    def release(self, holder: str) -> None:
        """Ends a lease; unknown ones are ignored, they may have expired."""
        self._ends.pop(holder, None)

    def clear(self) -> None:
        """Ends all."""
        self._ends.clear()

    def holders(self, now: float) -> list[str]:
        """Whose leases have not expired."""
        return [holder for holder, end in self._ends.items() if end > now]

    def next_end(self, now: float) -> float:
        """When the first of these expires; infinite without any."""
        return min((end for end in self._ends.values() if end > now), default=float("inf"))
