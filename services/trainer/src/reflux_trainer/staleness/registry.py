"""The policies by the names that run files use."""

from typing import Literal

from reflux_trainer.staleness.base import StalenessPolicy
from reflux_trainer.staleness.drop import Drop
from reflux_trainer.staleness.pace import Pace
from reflux_trainer.staleness.wait import Wait

Staleness = Literal["wait", "pace", "drop"]
POLICIES: dict[Staleness, type[StalenessPolicy]] = {"wait": Wait, "pace": Pace, "drop": Drop}
