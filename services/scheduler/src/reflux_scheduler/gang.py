"""What a job asks of the cluster, and the answer: demands of a gang, and where its members go."""

from dataclasses import dataclass

from reflux_scheduler.errors import InvalidJob
from reflux_scheduler.topology import Level, Resources

MAX_MEMBERS = 10_000
"""Members of a gang: a guard against mistakes; a job of this size still fits into one message of 4 MiB."""

MAX_ROLES = 64


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """`count` members of one size; all of them inside one domain of `required_level`."""

    role: str
    count: int
    each: Resources
    required_level: Level = "cluster"


@dataclass(frozen=True, slots=True)
class GangDemand:
    """Roles that start together or not at all, inside one domain of `required_level`."""

    roles: tuple[RoleDemand, ...]
    required_level: Level = "cluster"

    def __post_init__(self) -> None:
        if not self.roles:
            raise InvalidJob("roles", [], "a job has at least one role")
        if len(self.roles) > MAX_ROLES:
            raise InvalidJob("roles", len(self.roles), f"a job has at most {MAX_ROLES} roles")
        names = [demand.role for demand in self.roles]
        for name in names:
            if names.count(name) > 1:
                raise InvalidJob("roles.name", name, "two roles share this name; give each its own")
        for demand in self.roles:
            if demand.count < 1:
                raise InvalidJob(f"roles[{demand.role}].count", demand.count, "a role has at least one member")
            if min(demand.each.gpus, demand.each.millicpus, demand.each.memory_bytes) < 0:
                raise InvalidJob(f"roles[{demand.role}].resources", demand.each, "an amount is below zero")
        if sum(demand.count for demand in self.roles) > MAX_MEMBERS:
            raise InvalidJob("roles.count", sum(d.count for d in self.roles), f"a gang has <= {MAX_MEMBERS} members")

    def total(self) -> Resources:
        """Sum over all members."""
        amount = Resources()
        for demand in self.roles:
            amount = amount + demand.each.times(demand.count)
        return amount


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a role: its rank in topology order, its node, its share of it."""

    role: str
    rank: int
    node: str
    share: Resources
    gpu_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The tightest domain that holds the whole gang, and its members (roles in the order asked, ranks ascending)."""

    level: Level
    domain: tuple[str, ...]
    members: tuple[Member, ...]
