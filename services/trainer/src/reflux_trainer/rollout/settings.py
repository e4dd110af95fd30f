"""Settings of one rollout worker process."""

from typing import Annotated

from pydantic import Field

from reflux_kit.settings import ServiceSettings, prefix


class RolloutSettings(ServiceSettings):
    """Environment prefix REFLUX_ROLLOUT_; run and rank come from the agent that starts the process."""

    model_config = prefix("rollout")

    run: Annotated[str, Field(validation_alias="REFLUX_RUN")] = ""
    """Needed. The run to work for."""

    rank: Annotated[int, Field(validation_alias="REFLUX_RANK")] = 0
    """Rank among the workers of the run."""

    prompts_at_once: int = Field(default=0, ge=0, le=1024)
    """Prompts that the worker holds at the same time; 0: its share of the run's open prompts, at least 16."""

    peer_seconds: float = Field(default=120.0, gt=0)
    """How long a generation may take, a gateway that is away included, before the prompt goes back to the queue."""

    heartbeat_seconds: float = Field(default=1.0, gt=0)
    """Pause between two heartbeats of all claims."""

    idle_claim_seconds: float = Field(default=5.0, gt=0)
    """Claims of a worker that has not been heard of for this long are taken over."""
