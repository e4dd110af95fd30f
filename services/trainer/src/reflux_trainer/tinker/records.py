"""What the API remembers: sessions, models, checkpoints, samplers. Values, stored as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from reflux.checkpoint.v1.checkpoint_pb2 import StoredObject
from reflux_trainer.tinker.names import Kind, adapter_name

SamplerKind = Literal["base", "named", "snapshot", "inflight"]


class Record:
    """A value that Redis keeps as JSON; keys of later versions are ignored."""

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))  # pyright: ignore[reportArgumentType]  (all records are dataclasses)

    @classmethod
    def from_json(cls, raw: bytes | str) -> Self:
        """Reads what `to_json` wrote."""
        known = {each.name for each in fields(cls)}  # pyright: ignore[reportArgumentType]
        return cls(**{key: value for key, value in json.loads(raw).items() if key in known})


@dataclass(frozen=True, kw_only=True)
class Session(Record):
    """One client's session."""

    session_id: str
    tenant: str
    created_at: float
    display_name: str | None = None
    user_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Lora(Record):
    """Shape and start of an adapter."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True, kw_only=True)
class Model(Record):
    """One training run of the API: a LoRA adapter on a base model."""

    model_id: str
    session_id: str
    tenant: str
    base_model: str
    created_at: float
    lora: dict[str, Any]
    user_metadata: Mapping[str, Any] | None = None
    copied_from: str = ""
    """Checkpoint that the slot holds a copy of; such a slot is not trained."""

    @property
    def adapter(self) -> str:
        """Name of the adapter at the learner."""
        return adapter_name(self.model_id)

    @property
    def shape(self) -> Lora:
        """The adapter's shape."""
        return Lora(**self.lora)


@dataclass(frozen=True, kw_only=True)
class Weights(Record):
    """Stored objects of an adapter; none of them is the base model itself."""

    objects: list[list[Any]] = field(default_factory=list)
    """Key, size in bytes and checksum of each."""

    @property
    def key(self) -> str:
        """Tells weights apart; "" is the base."""
        return self.objects[0][0] if self.objects else ""

    @property
    def size_bytes(self) -> int:
        """Of all objects."""
        return sum(size for _key, size, _checksum in self.objects)

    @property
    def messages(self) -> list[StoredObject]:
        """As the learner takes them."""
        return [StoredObject(key=key, size_bytes=size, checksum=checksum) for key, size, checksum in self.objects]

    @classmethod
    def of(cls, objects: Any) -> "Weights":
        """Of a SaveState response's objects."""
        return cls(objects=[[each.key, each.size_bytes, each.checksum] for each in objects])


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """Saved weights under a name; `training` ones hold the optimizer, too."""

    uri: str
    model_id: str
    kind: Kind
    checkpoint_id: str
    base_model: str
    lora: dict[str, Any]
    weights: dict[str, Any]
    created_at: float
    seq_id: int = -1
    """Operation of the model that saved it."""
    expires_at: float | None = None
    public: bool = False
    """Whether other tenants may read it by its address."""
    copied_from: str = ""
    user_metadata: Mapping[str, str] | None = None

    @property
    def stored(self) -> Weights:
        """Where the bytes are."""
        return Weights(**self.weights)


@dataclass(frozen=True, kw_only=True)
class Sampler(Record):
    """A sampling session: which weights answer."""

    sampler_id: str
    session_id: str
    tenant: str
    base_model: str
    kind: SamplerKind
    model_id: str = ""
    """Model that an inflight sampler follows."""
    model_path: str | None = None
    weights: dict[str, Any] = field(default_factory=dict)
    """Empty for inflight samplers, which look up the newest."""
    created_at: float = 0.0

    @property
    def stored(self) -> Weights:
        """Where the bytes are."""
        return Weights(**self.weights)


@dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """How far a model is: behind its last operation whose result is recorded."""

    next_seq: int = 0
    """Sequence number that is executed next."""
    op_id: int = 0
    """The learner's number of the last operation that changed the adapter."""
    saved_op_id: int = 0
    """Operation at which the recovery state was saved; 0 starts from a fresh adapter."""
    recovery: dict[str, Any] = field(default_factory=dict)
    """Weights and optimizer of that state."""
    touched_at: float = 0.0

    @property
    def recovery_weights(self) -> Weights:
        """Where the recovery state is."""
        return Weights(**self.recovery)
