"""Owns the values that a simulation is made of: jobs to come, faults of nodes, and options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from reflux_placement.gang import GangDemand
from reflux_placement.policy.view import DEFAULT_QUEUE, Decision, NodeState, View

Policy = Callable[[View], Decision]
"""What decides: the production policy or a rival. Pure; books on `view.room` what it decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    """A job that will arrive. Times are seconds."""

    name: str
    gang: GangDemand
    arrives_at: float
    seconds: float
    """How long it runs at its desired size, placed inside one domain."""

    estimate_seconds: float | None = None
    """What the policy is told; None is the truth, 0 is unknown."""

    queue: str = DEFAULT_QUEUE
    priority: int = 0
    preemptible: bool = True
    min_run_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    """Time between checkpoints while it runs; 0 saves nothing, so that a stop loses all of it."""

    @property
    def gpus(self) -> int:
        """GPUs at the desired size."""
        return self.gang.total().gpus


WARM_UP = 0.05
"""Share of the jobs that only fill the cluster; series and utilisation begin behind them."""


def window(jobs: Sequence[SimJob]) -> tuple[float, float]:
    """Time that is looked at: from the arrival behind the warm-up to the last arrival; jobs still run down after it."""
    arrivals = np.array([job.arrives_at for job in jobs])
    return float(np.quantile(arrivals, WARM_UP, method="lower")), float(arrivals.max())


@dataclass(frozen=True, slots=True)
class Fault:
    """A node leaves at `at` and is back `seconds` later."""

    at: float
    node: int
    seconds: float
    state: NodeState = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Rules of the simulated world; the same for every policy that is compared."""

    cross_rack_slowdown: float = 0.0
    """A gang with share s of its traffic between racks runs 1 + s * this times as long. 0: placement costs nothing."""

    restart_seconds: float = 0.0
    """Time to be up again after a preemption, a migration or a replacement."""

    movable_seconds: float = 60.0
    """How fresh a checkpoint must be for a job to count as movable."""

    wake_seconds: float = 0.0
    """A cycle runs at least this often while jobs wait; 0 runs cycles at events only."""

    samples: int = 400
    """Points of the time series inside the window (see `window`); it goes on for a quarter of it."""

    spares: frozenset[int] = frozenset()
    """Nodes held back for replacing failed ones."""


DEFAULT_OPTIONS = Options()
