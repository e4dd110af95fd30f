"""Settings of one adapter process."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from reflux_kit.settings import ServiceSettings, prefix
from reflux_transfer.settings import TransferEnvironment, TransferSettings


class AdapterSettings(ServiceSettings):
    """Environment prefix REFLUX_ENGINE_ADAPTER_; run and rank come from the agent that starts the process."""

    model_config = prefix("engine-adapter")

    engine: Literal["vllm", "sglang", "sglang-distributed"] = "vllm"
    """Whose routes are called. `sglang-distributed` broadcasts with gloo, where `sglang` shares a tmpfs with it."""

    engine_url: str = ""
    """Needed. Base URL of the engine's HTTP server, as this process and the gateway reach it."""

    api_key: Annotated[str, Field(repr=False)] = ""
    """Key that the engine asks for, if it does."""

    model: Path | None = None
    """Needed. Folder of the model that the engine was started with; its config.json tells the tensors."""

    model_id: str = ""
    """Name by which clients ask for the model, also the engine's served model name; empty takes the run's id, or the
    folder's name."""

    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the learner publishes; the engine casts to its own."""

    run: Annotated[str, Field(validation_alias="REFLUX_RUN")] = ""
    """Run that owns the replica; empty when it is shared."""

    rank: Annotated[int, Field(validation_alias="REFLUX_RANK")] = 0
    """Rank among the engines of the job."""

    node: Annotated[str, Field(validation_alias="REFLUX_NODE")] = ""
    """Topology path of the node."""

    capacity: int = Field(default=32, ge=1)
    """Sequences that the engine runs at once (vLLM: --max-num-seqs, SGLang: --max-running-requests)."""

    engine_ranks: int = Field(default=1, ge=1)
    """Tensor-parallel workers of the engine; `sglang-distributed` needs it."""

    scratch: Path = Path("/dev/shm")
    """Folder for the weights' file of `sglang`; a tmpfs, else each version goes through a disk."""

    start_seconds: float = Field(default=600.0, ge=0)
    """How long the engine may take to come up."""

    transfer: TransferSettings = Field(default_factory=TransferEnvironment)
    """How the transports are set up (REFLUX_TRANSFER_...); vLLM's workers read their own environment."""

    watch_seconds: float = Field(default=2.0, gt=0)
    """How often the engine is asked which version it serves."""
