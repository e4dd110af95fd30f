"""Owns the knobs of a scheduling cycle."""

from dataclasses import dataclass
from typing import Literal, get_args

BackfillOrder = Literal["area", "arrival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How the cycle decides. Raises ValueError for a knob that makes no sense."""

    backfill_depth: int = 2000
    """Blocked asks that are looked at per queue and cycle; those behind wait unseen. 0 is strict order: nothing of a
    queue starts behind its first blocked ask."""

    reservations: int = 1
    """Blocked asks that get a reservation, in the order of the cycle (EASY backfill has 1)."""

    patience_seconds: float = 4 * 3600.0
    """The oldest ask that waited longer gets a reservation of its own, wherever fair share puts it. This bounds how
    often it is overtaken."""

    backfill_order: BackfillOrder = "area"
    """Of the asks behind a queue's first blocked one: those with the smallest GPU-seconds first, or the oldest first.
    The reservation goes by arrival in both."""

    locality_patience_seconds: float = 300.0
    """A gang waits for at least this long for a place inside one domain of its preferred level, if one could hold it;
    then it takes what there is (Slurm's max_switch_wait has the same default)."""

    locality_patience_share: float = 1.0
    """One that will run for long waits for longer: for this share of its `expected_seconds`. Ski rental: who waits no
    longer than crossing racks would cost never pays more than twice the least. All-reduce is 2 to 4 times slower across
    racks (nccl-tests#43, nccl#1801) and half of a step, so crossing costs about as much again as the run: a share of 1.
    0: all gangs wait equally long."""

    locality_patience_longest_seconds: float = 24 * 3600.0
    """The share of the run time counts up to this. A larger `locality_patience_seconds` stays as it is."""

    preemption: bool = True
    """Whether running jobs may be stopped for others."""

    preemption_attempts: int = 8
    """Searches for a set of victims per cycle."""

    preemption_domains: int = 6
    """Domains per level that such a search tries, most promising first."""

    shrinking: bool = True
    """Whether elastic jobs give up members above their minimum for pending jobs."""

    growing: bool = True
    """Whether elastic jobs grow into room that no pending job can use."""

    defragmentation: bool = True
    """Whether movable jobs migrate for the first ask that only fragmentation keeps waiting."""

    defragmentation_seconds: float = 300.0
    """An ask has to have waited this long, and be promised room no sooner than that, before others move for it. A
    search in vain is repeated after this time."""

    defragmentation_moves: int = 2000
    """Most moves that the search for a migration may try in one go, and most domains that it may try to clear. On a
    small cluster it is fewer: a twelfth of the number of nodes, but at least 200 (`makeroom.search_limits`)."""

    explain: bool = True
    """Whether every wait gets a sentence; without it sentences are empty and the cycle is faster."""

    def __post_init__(self) -> None:
        for name in (
            "backfill_depth",
            "reservations",
            "preemption_attempts",
            "patience_seconds",
            "locality_patience_seconds",
            "locality_patience_share",
            "locality_patience_longest_seconds",
            "defragmentation_seconds",
            "defragmentation_moves",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: write zero or more")
        if self.backfill_order not in get_args(BackfillOrder):
            raise ValueError(f"backfill_order = {self.backfill_order!r}: write {' or '.join(get_args(BackfillOrder))}")
        if self.preemption_domains < 1:
            raise ValueError(f"preemption_domains = {self.preemption_domains}: write one or more")
