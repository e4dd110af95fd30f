"""What a client asked for: the values of a job's roles and rules."""

from dataclasses import dataclass

from reflux_placement.gang import GangDemand, Relation, RoleDemand
from reflux_placement.policy.view import DEFAULT_QUEUE
from reflux_placement.topology import CLUSTER, Resources


@dataclass(frozen=True, slots=True)
class RoleTemplate:
    """One role as requested. `serves` marks roles that run until the others are done."""

    name: str
    count: int
    each: Resources
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    max_restarts: int = 0
    required_level: str = CLUSTER
    serves: bool = False
    stop_grace_seconds: float = 10.0
    min_count: int | None = None
    max_count: int | None = None
    preferred_level: str = ""
    segment_size: int = 0
    segment_level: str = "rack"
    max_per_domain: int = 0
    spread_level: str = ""
    traffic: float = 0.0

    def demand(self) -> RoleDemand:
        """The part that placement looks at."""
        return RoleDemand(
            role=self.name,
            count=self.count,
            each=self.each,
            min_count=self.min_count,
            max_count=self.max_count,
            required_level=self.required_level,
            preferred_level=self.preferred_level,
            segment_size=self.segment_size,
            segment_level=self.segment_level,
            max_per_domain=self.max_per_domain,
            spread_level=self.spread_level,
            traffic=self.traffic,
        )


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a client asked for."""

    display_name: str
    roles: tuple[RoleTemplate, ...]
    required_level: str = CLUSTER
    preferred_level: str = ""
    relations: tuple[Relation, ...] = ()
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    protected: bool = False
    """Never preempted."""

    expected_seconds: float = 0.0
    min_run_seconds: float = 0.0

    def demand(self) -> GangDemand:
        """The part that placement looks at. Raises InvalidGang when it contradicts itself."""
        return GangDemand(
            roles=tuple(role.demand() for role in self.roles),
            required_level=self.required_level,
            preferred_level=self.preferred_level,
            relations=self.relations,
        )

    def role(self, name: str) -> RoleTemplate:
        """The template of a role."""
        return next(role for role in self.roles if role.name == name)
