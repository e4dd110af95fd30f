"""Documents about models, checkpoints and samplers, as the SDK's REST client reads them. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from reflux_trainer.tinker.fleet import Base
from reflux_trainer.tinker.records import Checkpoint, Lora, Model, Progress

T = TypeVar("T")
_MAX_PAGE = 1000


def page(found: Sequence[T], offset: int, limit: int) -> tuple[list[T], dict[str, int]]:
    """A part of a list, and the cursor that tells where it lies."""
    limit = min(max(limit, 1), _MAX_PAGE)
    return list(found[offset : offset + limit]), {"offset": offset, "limit": limit, "total_count": len(found)}


def capabilities(bases: Sequence[Base]) -> dict[str, Any]:
    """What the server offers."""
    models = [
        {"model_name": base.name, "max_context_length": base.max_context, "trainable": True, "sampleable": True}
        for base in bases
    ]
    return {"supported_models": models}


def model_info(model: Model, base: Base, tokenizer_id: str) -> dict[str, Any]:
    """Answer of get_info."""
    data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": tokenizer_id}
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_data": data,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": model.shape.rank,
        "model_name": base.name,
    }


def checkpoint_entry(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint of a list."""
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.uri,
        "size_bytes": checkpoint.stored.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def training_run(model: Model, progress: Progress, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """A model as the SDK calls it; `checkpoints` newest first."""
    newest = {kind: next((each for each in checkpoints if each.kind == kind), None) for kind in ("training", "sampler")}
    metadata = {key: str(value) for key, value in (model.user_metadata or {}).items()}
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.tenant,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.shape.rank,
        "last_request_time": _time(max(model.created_at, progress.touched_at)),
        "last_checkpoint": newest["training"] and checkpoint_entry(newest["training"]),
        "last_sampler_checkpoint": newest["sampler"] and checkpoint_entry(newest["sampler"]),
        "user_metadata": metadata or None,
    }


def weights_info(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a client has to know to load a checkpoint."""
    shape = Lora(**checkpoint.lora)
    return {
        "base_model": checkpoint.base_model,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": shape.rank,
        "train_unembed": shape.train_unembed,
        "train_mlp": shape.train_mlp,
        "train_attn": shape.train_attn,
    }


def _time(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat()
