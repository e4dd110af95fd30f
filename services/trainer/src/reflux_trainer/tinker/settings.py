"""Settings of the Tinker API (environment prefix REFLUX_TINKER_)."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class TinkerSettings(BaseModel):
    """Which base models are offered, to whom, and what may pile up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_models: dict[str, Path] = Field(default={})
    """Base models by the name that clients use: folders in Hugging Face layout with a tokenizer. Empty is no API."""

    tokenizer_ids: dict[str, str] = Field(default={})
    """What clients are told to load as the tokenizer of a base model; a base without an entry is called by its name."""

    keys_file: str = ""
    """TOML file of `[[keys]]` tables with `name` (the tenant) and `sha256` (of the key). Without it and without a stack
    secret every key is a tenant of its own; without it and with a stack secret nobody gets in."""

    samplers_per_base: int = Field(default=2, ge=1, le=64)
    """Inference replicas of a base model: so many sampler weights can be served at the same time."""

    weight_dtype: str = Field(default="float32", pattern="^(float32|bfloat16)$")
    """Type that replicas compute in; log-probs of learner and sampler agree to 1e-4 in float32 only."""

    start_seconds: float = Field(default=180.0, gt=0)
    """Time for a base model's processes to start before what waits for them is told so."""

    idle_seconds: float = Field(default=1800.0, gt=0)
    """A base model without any request for this long gives its processes back."""

    session_seconds: float = Field(default=3600.0, gt=0)
    """A session without any heartbeat for this long is over: its samplers are forgotten."""

    result_seconds: int = Field(default=3600, ge=60)
    """How long the result of a future is kept once it is there."""

    poll_seconds: float = Field(default=5.0, gt=0, le=30.0)
    """How long a poll of a future waits for its result."""

    batch_polls: bool = False
    """Tells clients to ask for all samples of a session in one poll, not for each by one of its own."""

    max_pending: int = Field(default=4096, ge=1)
    """Futures of one tenant that may be open; more are answered with 429."""

    max_body_bytes: int = Field(default=64 << 20, ge=1 << 10, le=256 << 20)
    """Largest request body, unpacked."""

    max_models: int = Field(default=64, ge=1)
    """Models of one base that the learner holds; the one that idles for longest is put away until it is needed."""

    sync_seconds: float = Field(default=120.0, gt=0)
    """Time for new sampler weights to reach their replica."""

    max_logged_operations: int = Field(default=64, ge=1)
    """Operations of a model that a recovery may have to run again; beyond it the state is saved."""


class TinkerEnvironment(TinkerSettings, BaseSettings):
    """The settings as the environment has them."""

    model_config = SettingsConfigDict(env_prefix="REFLUX_TINKER_", extra="ignore", frozen=True)
