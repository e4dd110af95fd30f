"""Request bodies in JSON. Fields that nobody knows are ignored, as the API asks."""

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflux_kit.errors import InvalidRequest

_HIGHEST_SEQ = (1 << 63) - 1
_MAX_TTL = 315_360_000
"""Ten years in seconds."""


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class CreateSession(Body):
    """Opens a session."""

    tags: list[str] = Field(default=[], max_length=64)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = Field(default="", max_length=64)
    display_name: str | None = Field(default=None, max_length=256)


class SessionHeartbeat(Body):
    """Keeps a session alive."""

    session_id: str


class LoraConfig(Body):
    """Shape of an adapter."""

    rank: int = Field(default=32, ge=1, le=1024)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """Family of the optimizer."""

    type: str = "adamw"


class CreateModel(Body):
    """A fresh model."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=1_000_000)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class GetInfo(Body):
    """Asks what a model is."""

    model_id: str


class AdamParams(Body):
    """One step of AdamW with decoupled weight decay; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = Field(default=1e-4, ge=0, le=1e3)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0, le=1e3)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class Ordered(Body):
    """An operation of a model at its place in the order."""

    model_id: str
    seq_id: int = Field(ge=0, le=_HIGHEST_SEQ)


class OptimStep(Ordered):
    """Applies and clears the gradient."""

    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None
    """Parameters of another family."""


class SaveWeights(Ordered):
    """Saves weights and optimizer."""

    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=3600, le=_MAX_TTL)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Ordered):
    """Makes the present weights available to samplers, under a name or as a sampling session."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=1_000_000_000)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, ge=3600, le=_MAX_TTL)
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """Loads a checkpoint into a model, or makes a model of it (`session_id` and `model_seq_id`)."""

    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0, le=_HIGHEST_SEQ)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=1_000_000)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None


class CreateSamplingSession(Body):
    """A sampler of a base model or of saved weights."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=1_000_000_000)
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(Body):
    """A part of a prompt; only token ids are served."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default=[], max_length=1 << 20)


class Prompt(Body):
    """A prompt in parts."""

    chunks: list[PromptChunk] = Field(max_length=65536)


class SamplingParams(Body):
    """How tokens are drawn; `stop` None keeps the model's own end tokens, a list replaces them."""

    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)
    stop: str | list[str] | list[int] | None = Field(default=None, max_length=64)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1, le=1 << 31)
    top_p: float = Field(default=1.0, ge=0, le=1)


class Sample(Body):
    """Draws samples of one prompt."""

    sampling_session_id: str
    seq_id: int = Field(ge=0, le=_HIGHEST_SEQ)
    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=20)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=20)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0


class FutureId(Body):
    """Names a future."""

    request_id: str


class Ends(Body):
    """Asks which futures of a sampling session have ended."""

    class Target(Body):
        """One client of a sampling session."""

        sampling_session_id: str
        cloned_sampler_id: int = Field(default=0, ge=0)

    target: Target
    prev_cursor: int = Field(default=0, ge=0)
    timeout: float | None = Field(default=None, ge=0)


class JoinSamplingSession(Body):
    """One more client of a sampling session."""

    sampling_session_id: str


class CopyWeights(Body):
    """Copies a checkpoint into a slot of the caller's session."""

    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = Field(default=None, ge=3600, le=_MAX_TTL)
    weights_access_token: str | None = None


class Expiry(Body):
    """How long a checkpoint is kept from now on; None is for good."""

    ttl_seconds: int | None = Field(default=None, ge=3600, le=_MAX_TTL)


class TinkerPath(Body):
    """Names a checkpoint."""

    tinker_path: str


T = TypeVar("T", bound=Body)


def parse(kind: type[T], raw: bytes) -> T:
    """A body of `kind`. Raises `InvalidRequest` naming the field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRequest(f"{where}: {first['msg']}", field=where) from None


def canonical(raw: bytes) -> bytes:
    """Equal for equal JSON documents, whatever the order of their keys."""
    return json.dumps(json.loads(raw), sort_keys=True).encode()
