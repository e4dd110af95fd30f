"""Settings of one engine process."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from reflux_inference_gateway.engine.kinds import KvPolicy, RoleName
from reflux_kit.settings import ServiceSettings, prefix
from reflux_transfer.modes import WantedMode
from reflux_transfer.settings import TransferEnvironment, TransferSettings, Transport


class EngineSettings(ServiceSettings):
    """Environment prefix REFLUX_ENGINE_; run and rank come from the agent that starts the process."""

    model_config = prefix("engine")

    http_listen: str = "127.0.0.1:0"

    model: Path | None = None
    """Needed. Folder with config.json, model.safetensors and tokenizer.json (Hugging Face layout)."""

    model_id: str = ""
    """Name by which clients ask for the model; empty takes the run's id, or the folder's name."""

    run: Annotated[str, Field(validation_alias="REFLUX_RUN")] = ""
    """Run that owns the replica; empty when it is shared."""

    rank: Annotated[int, Field(validation_alias="REFLUX_RANK")] = 0
    """Rank among the engines of the job."""

    node: Annotated[str, Field(validation_alias="REFLUX_NODE")] = ""
    """Topology path of the node."""

    role: RoleName = "both"
    """What the gateway sends: `prefill` computes prompts for the others, `decode` gets long ones computed."""

    advertise_host: str = ""
    """Host under which others reach this process; empty takes the bound one, or this host's name for 0.0.0.0."""

    weights: Literal["broker", "folder"] = "broker"
    """Where later versions come from: the weight broker, or nowhere (only the folder's weights)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic; exactness checks need float32."""

    transport: Annotated[Transport, Field(validation_alias="REFLUX_TRANSPORT")] = "auto"
    """Transport of the memory that the replica offers to others, `auto` takes what the start-up probe chooses; it reads
    by that of its source."""

    transfer: TransferSettings = Field(default_factory=TransferEnvironment)
    """How the transports are set up (REFLUX_TRANSFER_...)."""

    weight_mode: WantedMode = "auto"
    """`swap` keeps a second copy and pauses for an exchange of pointers, `in_place` pulls over the only copy and pauses
    for the transfer; `auto` takes `swap` where two copies and the KV cache fit the memory budget."""

    max_adapters: int = Field(default=0, ge=0, le=256)
    """LoRA adapters that runs may attach at the same time. Above 0 the model itself stays what its folder holds: all
    adapters stand on the same weights."""

    max_adapter_rank: int = Field(default=64, ge=1, le=1024)
    """Highest rank of an adapter; bounds the memory of its two buffers."""

    memory_budget_bytes: int = Field(default=0, ge=0)
    """Memory for weights and KV cache; 0 takes what the host has available at the start."""

    max_rows: int = Field(default=256, ge=1, le=4096)
    """Sequences that decode at the same time, as far as the KV budget holds what they may generate."""

    max_model_len: int = Field(default=0, ge=0)
    """Longest sequence, prompt and generated tokens; 0 takes the model's own limit."""

    kv_budget_bytes: int = Field(default=2 << 30, ge=1 << 16)
    """Memory of the KV cache; bounds the tokens, prompt and all that may be generated, of the sequences that decode."""

    max_waiting_samples: int = Field(default=4096, ge=1)
    """Samples that may wait for a row; further requests get 429 or RESOURCE_EXHAUSTED."""

    prefill_tokens_per_step: int = Field(default=512, ge=1)
    """Prompt tokens that are computed between two decode steps; a longer prompt is cut."""

    prefix_cache_bytes: int = Field(default=256 << 20, ge=0)
    """Memory for computed prompts, which later prompts that begin alike do not compute again; 0 keeps none."""

    handover_bytes: int = Field(default=256 << 20, ge=0)
    """Memory for computed prompts that other engines may read; when it is full they compute further ones themselves."""

    handover_seconds: float = Field(default=30.0, gt=0)
    """How long another engine may read a computed prompt."""

    kv_after_swap: KvPolicy = "refresh"
    """After new weights: `refresh` prefills running sequences again, `keep` goes on with old keys and values."""

    threads: int = Field(default=1, ge=1)
    """OpenMP threads of the engine; more than one is slower on a contended machine."""

    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest HTTP body."""
