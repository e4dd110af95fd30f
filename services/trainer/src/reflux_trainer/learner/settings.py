"""Settings of a learner process (environment prefix REFLUX_LEARNER_)."""

from typing import Annotated

from pydantic import Field

from reflux_kit.settings import ServiceSettings, prefix
from reflux_runs.preflight import MAX_BATCH_MIB
from reflux_transfer.settings import TransferEnvironment, TransferSettings, Transport


class LearnerSettings(ServiceSettings):
    """Run and rank come from the agent that starts the process."""

    model_config = prefix("learner")

    http_listen: str = "127.0.0.1:0"

    max_message_mib: int = Field(default=MAX_BATCH_MIB, ge=1, le=1024)
    """A batch is one request; the run file's check refuses what exceeds the default."""

    run: Annotated[str, Field(validation_alias="REFLUX_RUN")] = ""
    """Needed. Run that the learner serves."""

    transport: Annotated[Transport, Field(validation_alias="REFLUX_TRANSPORT")] = "auto"
    """What the start-up probe has to find working; models name their transport themselves, `auto` is what it chose."""

    transfer: TransferSettings = Field(default_factory=TransferEnvironment)
    """How the transports are set up (REFLUX_TRANSFER_...)."""

    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that share the model (FSDP2 over gloo); adapters need one. Rank 0 is the process that serves."""

    rank_timeout_seconds: float = Field(default=60.0, gt=0.0)
    """Longest wait of a rank for the others; a rank whose process ends is noticed at once."""

    threads: int = Field(default=1, ge=1)
    """OpenMP threads of the torch thread; more than one is slower on a contended machine."""
