"""The model folder and the sizes that fit it: everything that can refuse a start."""

from dataclasses import dataclass
from pathlib import Path

import torch

from reflux_inference_gateway.engine.prefix_store import BLOCK_TOKENS, block_bytes
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.tokenizer import TextTokenizer
from reflux_kit.errors import StartupError
from reflux_model.config import ModelConfig
from reflux_model.errors import ModelFolderError, ParameterMismatchError, UnsupportedModelError
from reflux_model.folder import load_folder

_ADDRESS_SPACE_BYTES = 1 << 42
"""Of the KV cache: every row has addresses for the longest sequence, whatever it holds."""


@dataclass(frozen=True)
class LoadedModel:
    """What the model folder holds."""

    folder: Path
    config: ModelConfig
    weights: Weights
    tokenizer: TextTokenizer
    eos_ids: tuple[int, ...]


def load_model(settings: EngineSettings) -> LoadedModel:
    """Reads the model folder; raises StartupError that names what is missing."""
    if settings.model is None:
        raise StartupError("REFLUX_ENGINE_MODEL must name a model folder")
    try:
        config, params = load_folder(settings.model, dtype=getattr(torch, settings.dtype))
        tokenizer = TextTokenizer(settings.model)
    except (ModelFolderError, UnsupportedModelError, ParameterMismatchError, OSError, ValueError) as error:
        raise StartupError(f"REFLUX_ENGINE_MODEL: {error}") from None
    eos_ids = tokenizer.eos_ids() | ({config.eos_token_id} if config.eos_token_id is not None else set())
    return LoadedModel(settings.model, config, Weights(params, version=0, epoch=0), tokenizer, tuple(sorted(eos_ids)))


def core_options(settings: EngineSettings, config: ModelConfig) -> CoreOptions:
    """Rows, lengths and tokens that fit the KV budget; raises StartupError when not even one sequence does."""
    length = min(settings.max_model_len or config.max_positions, config.max_positions)
    block = block_bytes(config, getattr(torch, settings.dtype).itemsize)
    row_bytes = block * length // BLOCK_TOKENS
    if settings.kv_budget_bytes < row_bytes:
        raise StartupError(
            f"REFLUX_ENGINE_KV_BUDGET_BYTES={settings.kv_budget_bytes} does not hold one sequence of {length} tokens "
            f"({row_bytes} bytes); raise it or set REFLUX_ENGINE_MAX_MODEL_LEN"
        )
    rows = max(1, min(settings.max_rows, _ADDRESS_SPACE_BYTES // row_bytes))
    blocks = settings.prefix_cache_bytes // block
    return CoreOptions(
        max_rows=rows,
        max_model_len=length,
        kv_tokens=min(settings.kv_budget_bytes * BLOCK_TOKENS // block, rows * length),
        prefill_tokens_per_step=settings.prefill_tokens_per_step,
        prefix_blocks=min(blocks, rows * length // BLOCK_TOKENS),
        kv_after_swap=settings.kv_after_swap,
    )
