"""Owns the values of a request (a gang of roles with constraints) and of its answer (an assignment to nodes)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reflux_placement.errors import InvalidGang
from reflux_placement.topology import CLUSTER, Ints, Resources, Topology

MAX_MEMBERS = 200_000
MAX_ROLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDemand:
    """`count` members of one size; hard constraints are named required or max, the others are preferences."""

    role: str
    count: int
    each: Resources
    min_count: int | None = None
    """The gang may start and go on with this many; None is `count` (rigid). 0 <= min_count <= count."""

    max_count: int | None = None
    """Idle room may grow the role up to this many; None is `count`."""

    required_level: str = CLUSTER
    """All members inside one domain of this level."""

    preferred_level: str = ""
    """The tightest level to try first; empty tries from the tightest one up."""

    segment_size: int = 0
    """Members per segment; every segment lies inside one domain of `segment_level`. 0 means no segments. `count`,
    `min_count` and `max_count` are multiples of it."""

    segment_level: str = "rack"

    max_per_domain: int = 0
    """Anti-affinity: at most this many members in one domain of `spread_level`; 0 is no bound."""

    spread_level: str = ""
    """With `max_per_domain` 0: prefer as many domains of this level as possible (decode replicas over racks)."""

    traffic: float = 0.0
    """Bytes per step that the members exchange among themselves (uniform all-to-all)."""

    @property
    def least(self) -> int:
        """Members without which the gang does not run."""
        return self.count if self.min_count is None else self.min_count

    @property
    def most(self) -> int:
        """Members that it may grow to."""
        return self.count if self.max_count is None else self.max_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A constraint or a flow between two roles. Member i of `role` belongs to member i * |near| // |role| of `near`."""

    role: str
    near: str
    level: str = ""
    """Every member of `role` lies in the same domain of this level as its peer; empty is no constraint."""

    required: bool = True
    """False makes `level` a preference (through the cost only)."""

    traffic: float = 0.0
    """Bytes per step between the two roles, spread evenly over all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangDemand:
    """Roles that start together or not at all. Checked on construction; levels are checked against the topology."""

    roles: tuple[RoleDemand, ...]
    required_level: str = CLUSTER
    preferred_level: str = ""
    relations: tuple[Relation, ...] = field(default=())
    # A cycle asks for these of every pending gang again and again, so they are worked out once.
    _total: Resources = field(init=False, repr=False, compare=False)
    _least_total: Resources = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "_total", _sum(self.roles, [demand.count for demand in self.roles]))
        object.__setattr__(self, "_least_total", _sum(self.roles, [demand.least for demand in self.roles]))
        key = (self.roles, self.required_level, self.preferred_level, self.relations)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        """Built anew in another process: hashes of strings differ there."""
        return _rebuilt, (self.roles, self.required_level, self.preferred_level, self.relations)

    def _check(self) -> None:
        if not self.roles:
            raise InvalidGang("roles", [], "a job has at least one role")
        if len(self.roles) > MAX_ROLES:
            raise InvalidGang("roles", len(self.roles), f"a job has at most {MAX_ROLES} roles")
        names = [demand.role for demand in self.roles]
        for name in names:
            if names.count(name) > 1:
                raise InvalidGang("roles.name", name, "two roles share this name; give each its own")
        for demand in self.roles:
            _check_role(demand)
        if not any(demand.count for demand in self.roles):
            raise InvalidGang("roles.count", 0, "every role has a count of zero: there is nothing to run")
        if sum(demand.most for demand in self.roles) > MAX_MEMBERS:
            raise InvalidGang("roles.count", sum(d.most for d in self.roles), f"a gang has <= {MAX_MEMBERS} members")
        for relation in self.relations:
            if relation.role not in names or relation.near not in names or relation.role == relation.near:
                what = f"{relation.role} near {relation.near}"
                raise InvalidGang("relations", what, f"name two different roles of this job: {', '.join(names)}")
            if relation.traffic < 0:
                raise InvalidGang("relations.traffic", relation.traffic, "bytes are zero or more")

    def demand(self, role: str) -> RoleDemand:
        """The demand of a role."""
        return next(demand for demand in self.roles if demand.role == role)

    def total(self) -> Resources:
        """Sum over all members at their desired counts."""
        return self._total

    def least_total(self) -> Resources:
        """Sum over all members at the counts that the gang can start with."""
        return self._least_total

    def check_levels(self, topology: Topology) -> None:
        """Raises UnknownLevel for a constraint at a level that the topology does not have."""
        named = [self.required_level, self.preferred_level]
        for demand in self.roles:
            named += [demand.required_level, demand.preferred_level, demand.spread_level]
            named += [demand.segment_level] if demand.segment_size else []
        named += [relation.level for relation in self.relations]
        for level in named:
            if level:
                topology.tightness(level)


def _rebuilt(
    roles: tuple[RoleDemand, ...], required_level: str, preferred_level: str, relations: tuple[Relation, ...]
) -> GangDemand:
    return GangDemand(roles=roles, required_level=required_level, preferred_level=preferred_level, relations=relations)


def _sum(roles: Sequence[RoleDemand], counts: Sequence[int]) -> Resources:
    amount = Resources()
    for demand, count in zip(roles, counts, strict=True):
        amount = amount + demand.each.times(count)
    return amount


def _check_role(demand: RoleDemand) -> None:
    key = f"roles[{demand.role}]"
    if not 0 <= demand.least <= demand.count <= demand.most:
        counts = (demand.least, demand.count, demand.most)
        raise InvalidGang(f"{key}.count", counts, "write 0 <= min_count <= count <= max_count")
    if min(demand.each.row) < 0:
        raise InvalidGang(f"{key}.resources", demand.each, "an amount is below zero")
    if demand.segment_size < 0 or demand.max_per_domain < 0 or demand.traffic < 0:
        raise InvalidGang(f"{key}", demand.segment_size, "segment_size, max_per_domain and traffic are zero or more")
    if demand.segment_size and any(n % demand.segment_size for n in (demand.least, demand.count, demand.most)):
        raise InvalidGang(
            f"{key}.segment_size", demand.segment_size, f"does not divide the counts of the role ({demand.count})"
        )
    if demand.max_per_domain and not demand.spread_level:
        raise InvalidGang(f"{key}.max_per_domain", demand.max_per_domain, "name the spread_level that it counts in")


@dataclass(frozen=True, eq=False)
class Assignment:
    """Where a gang goes, as arrays: for each role the node index of every rank (rank order follows the topology,
    segment by segment). `level` and `domain` name the tightest domain that holds all of it."""

    level: str
    domain: int
    nodes: dict[str, Ints]

    @property
    def num_members(self) -> int:
        """Members of all roles."""
        return sum(len(ranks) for ranks in self.nodes.values())

    def used_nodes(self) -> Ints:
        """Indices of all nodes with a member, ascending."""
        held = [ranks for ranks in self.nodes.values() if len(ranks)]
        return np.unique(np.concatenate(held)) if held else np.zeros(0, dtype=np.int64)
