"""Settings of the trainer process."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from reflux_kit.settings import ServiceSettings, prefix
from reflux_trainer.tinker.settings import TinkerEnvironment, TinkerSettings


class TrainerSettings(ServiceSettings):
    """Environment prefix REFLUX_TRAINER_."""

    model_config = prefix("trainer")

    runs_dir: str = ""
    """Folder that holds one folder per run; empty takes `runs` below the state folder."""

    stack_pid: Annotated[int, Field(validation_alias="REFLUX_STACK_PID")] = 0
    """Parent of the whole stack, for memory figures; 0 measures the trainer's own process tree."""

    start_seconds: float = Field(default=120.0, gt=0)
    """Time for a run's processes to be placed, started and registered."""

    tenants_file: str = ""
    """TOML file of `[tenants.NAME]` tables with `max_runs` and `max_engines` (docs/operate.md); without it the tenants
    that tokens name have no bounds."""

    max_attempts: int = Field(default=5, ge=1)
    """Consecutive attempts without a new step after which a run is given up."""

    shared_adapters: int = Field(default=8, ge=1, le=256)
    """Seats for runs' adapters on a replica of a shared fleet."""

    shared_max_rank: int = Field(default=64, ge=1, le=1024)
    """Highest rank of an adapter on a shared fleet."""

    shared_idle_seconds: float = Field(default=1800.0, gt=0)
    """A shared fleet where no run has a seat for this long gives its processes back."""

    tinker: TinkerSettings = Field(default_factory=TinkerEnvironment)
    """The Tinker API (REFLUX_TINKER_...)."""

    @property
    def runs_folder(self) -> Path:
        """Where run folders are made."""
        if self.runs_dir:
            return Path(self.runs_dir)
        return Path(self.state_dir or ".reflux") / "runs"

    @property
    def cache_folder(self) -> Path:
        """Where tasks keep what is costly to build."""
        return Path(self.state_dir or ".reflux") / "cache"
