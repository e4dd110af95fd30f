"""Owns why a gang does not fit: the first demand that fails, where it comes closest, and who holds what is missing."""

from dataclasses import dataclass
from typing import Literal

Constraint = Literal["nodes", "size", "count", "segments", "spread", "relation", "sum", "shape", "stay"]
"""What fails: no node takes work, one member's size, a role's count, its segments, its bound per domain, a domain for
its relation, the sum of all roles, their arrangement together, or the domain that a running gang must not leave."""

RESOURCES = ("gpus", "millicpus", "memory_bytes")
"""In the order in which a shortage is looked for."""

MAX_NAMED = 5
_TITLES = {"gpus": "GPUs", "millicpus": "CPUs", "memory_bytes": "GiB of memory", "nodes": "nodes"}


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds some of a missing resource."""

    job: str
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """What is missing, in the domain that comes closest. Amounts in GPUs, thousandths of a CPU, bytes or nodes."""

    role: str
    """Empty when it is about the gang as a whole."""

    constraint: Constraint
    level: str
    resource: str
    needed: int
    available: int
    """Of `needed`, what would fit there now under the constraint."""

    capacity: int = 0
    """What the domain has when nobody holds any of it."""

    domain: str = ""
    """Full path."""

    fragmented: bool = False
    """The sum would do, but it lies in pieces that are too small."""

    segment_size: int = 0
    segment_level: str = ""
    bound: int = 0
    """Members that one domain of `spread_level` may hold."""

    spread_level: str = ""
    holders: tuple[Holder, ...] = ()
    ever: bool = False
    """It does not fit on the empty cluster either."""

    fitting_role: str = ""
    fitting_count: int = 0
    asked_count: int = 0
    """On the empty cluster the gang would fit with `fitting_count` instead of `asked_count` of `fitting_role`."""

    note: str = ""
    """The demand that members which stay break already; nothing is missing then."""

    @property
    def missing(self) -> int:
        """Amount that would have to become free."""
        return max(0, self.needed - self.available)

    @property
    def sentence(self) -> str:
        """For people: who needs what where, what is there, and who holds the rest."""
        if self.constraint == "nodes":
            return "no node takes new work"
        if self.note:
            return f"members that stay where they are do not allow it: {self.note}"
        who = f"one {self.role}" if self.constraint == "size" else self.role or "the gang"
        text = f"{who} needs {amount(self.resource, self.needed)}{self._manner()}, "
        if self.ever:
            text += f"the largest {self.level} ({self.domain}) has room for {amount(self.resource, self.available)}"
        else:
            text += f"{self.domain} has {amount(self.resource, self.available)} free"
        if self.fragmented and self.constraint in ("count", "shape"):
            text += " in pieces that fit"
        elif self.constraint in ("segments", "spread", "relation"):
            text += " that way"
        if self.fitting_count:
            text += f"; with {self.fitting_count} instead of {self.asked_count} {self.fitting_role} it would fit"
        return text + self._held_by()

    def _manner(self) -> str:
        where = " on one node" if self.level == "node" else f" in one {self.level}"
        if self.constraint == "segments":
            each = "on one node" if self.segment_level == "node" else f"inside one {self.segment_level}"
            return f"{where} in segments of {self.segment_size} members {each}"
        if self.constraint == "spread":
            return f"{where} with at most {self.bound} members in one {self.spread_level}"
        if self.constraint == "relation":
            return f"{where} on nodes that belong to the domain of its peers"
        if self.constraint == "stay":
            return f"{where}, which its members must not leave"
        return where

    def _held_by(self) -> str:
        if not self.holders:
            return ""
        named = ", ".join(f"{each.job} ({amount(self.resource, each.amount)})" for each in self.holders[:MAX_NAMED])
        more = len(self.holders) - MAX_NAMED
        return f"; held by {named}" + (f" and {more} more" if more > 0 else "")


def amount(resource: str, value: int) -> str:
    """An amount with its unit, as people write it."""
    if resource == "millicpus":
        return f"{value / 1000:g} {_TITLES[resource]}"
    if resource == "memory_bytes":
        return f"{value / (1 << 30):.3g} {_TITLES[resource]}"
    title = _TITLES[resource]
    return f"{value} {title.removesuffix('s') if value == 1 else title}"
