"""Prefill and decoding without gradients: the two calls that an engine makes.

A batch scheduler uses them like this:

    prefilled = prefill(params, config, tokens_BL, lengths_B)           # once per prompt
    cache.insert(prefilled.kv, rows, slots)                             # row -> one slot per sample
    tokens_B = sample(prefilled.logits_BV[rows], ...).tokens_B          # position lengths_B[row] of each sample
    logits_BV = decode_step(params, config, tokens_B, cache, positions_B)

Position of a token = its index in the sequence (prompt + completion), from 0. `params` is read at each call and never
kept, so new weights take effect by passing another dictionary; after that, running sequences may be prefilled again
under the new weights (prompt + tokens so far as one row of `tokens_BL`) or go on with the old keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_model.cache import PrefixKV, SlotCache
from reflux_model.config import ModelConfig
from reflux_model.layers import additive_mask, attend, embed, project_to_vocab, rotary_tables, run_layers
from reflux_model.parameters import Parameters
from reflux_model.projections import PLAIN, Projections

_BAND_ROWS = 8
_BAND_POSITIONS = 256


@dataclass(frozen=True)
class Prefilled:
    """Result of `prefill`: the logits after each row's last token, and the keys and values of all its tokens."""

    logits_BV: Tensor
    kv: PrefixKV


@torch.inference_mode()
def prefill(params: Parameters, config: ModelConfig, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Prefilled:
    """Runs whole sequences from position 0.

    `tokens_BL` is int64 and padded on the right with any valid id; `lengths_B` (int64, all >= 1) counts the real
    tokens, None means that all L are. Padding does not change the result of a row. Raises ValueError for an empty row.
    """
    rows, length = tokens_BL.shape
    if length == 0 or (lengths_B is not None and int(lengths_B.min()) < 1):
        raise ValueError("prefill needs at least one token per row")
    device = tokens_BL.device
    lengths = torch.full((rows,), length, device=device) if lengths_B is None else lengths_B
    dtype = params["model.embed_tokens.weight"].dtype
    shape = (config.num_layers, rows, config.num_kv_heads, length, config.head_size)
    keys = torch.empty(shape, dtype=dtype, device=device)
    values = torch.empty(shape, dtype=dtype, device=device)
    positions = torch.arange(length, device=device)
    mask = additive_mask(positions[None, :] <= positions[:, None], dtype)

    def causal(layer: int, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        keys[layer] = new_keys.transpose(1, 2)
        values[layer] = new_values.transpose(1, 2)
        return attend(queries, keys[layer], values[layer], mask)

    hidden = run_layers(params, config, embed(params, tokens_BL), rotary_tables(config, positions[None], dtype), causal)
    last = hidden[torch.arange(rows, device=device), lengths - 1]
    return Prefilled(project_to_vocab(params, last), PrefixKV(keys, values, lengths))


@dataclass(frozen=True)
class Segment:
    """Tokens at positions `start ..` of the sequence in `slot`; the slot holds the keys and values of all before."""

    slot: int
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)


@torch.inference_mode()
def extend(
    params: Parameters,
    config: ModelConfig,
    segments: Sequence[Segment],
    cache: SlotCache,
    projections: Projections = PLAIN,
) -> Tensor:
    """Writes the keys and values of all segments' tokens into the cache; returns their hidden states, hidden_TE.

    It is a prefill that can be cut anywhere: the segments of one call are computed side by side without padding, and a
    later call goes on where one ended. Slots are distinct. Raises ValueError when a segment is empty or does not fit.
    """
    if any(not segment.tokens or segment.end > cache.max_length for segment in segments):
        raise ValueError(f"segments need tokens, and end within the {cache.max_length} positions of a slot")
    device, dtype = cache.keys.device, cache.keys.dtype
    tokens_1T = torch.tensor([[token for segment in segments for token in segment.tokens]], device=device)
    spans = [torch.arange(segment.start, segment.end, device=device) for segment in segments]
    masks = [additive_mask(torch.arange(int(at[-1]) + 1, device=device)[None, :] <= at[:, None], dtype) for at in spans]

    def each_its_own(layer: int, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        mixed, first = torch.empty_like(queries), 0
        for segment, mask in zip(segments, masks, strict=True):
            part = slice(first, first + len(segment.tokens))
            keys, values = cache.keys[layer, segment.slot], cache.values[layer, segment.slot]
            keys[:, segment.start : segment.end] = new_keys[0, part].transpose(0, 1)
            values[:, segment.start : segment.end] = new_values[0, part].transpose(0, 1)
            mixed[:, part] = attend(
                queries[:, part], keys[None, :, : segment.end], values[None, :, : segment.end], mask
            )
            first = part.stop
        return mixed

    rope = rotary_tables(config, torch.cat(spans)[None], dtype)
    return run_layers(params, config, embed(params, tokens_1T), rope, each_its_own, projections)[0]


@torch.inference_mode()
def decode_step(
    params: Parameters,
    config: ModelConfig,
    tokens_B: Tensor,
    cache: SlotCache,
    positions_B: Tensor,
    slots_B: Tensor | None = None,
    projections: Projections = PLAIN,
) -> Tensor:
    """Feeds one token per row and returns the logits_BV of the next one.

    Row b writes its key and value at `positions_B[b]` (the index of `tokens_B[b]` in its sequence, below
    `cache.max_length`) of its slot and attends to positions 0..positions_B[b]. Rows may have different positions.
    Without `slots_B`, row b is slot b, which avoids a copy of the cache per layer: keep the batch dense with
    `SlotCache.move`. With `slots_B` (distinct) any slots may be used. All tensors are int64. Raises ValueError when a
    row does not fit.
    """
    rows = tokens_B.shape[0]
    lengths = [position + 1 for position in positions_B.tolist()]
    span = max(lengths)
    if span > cache.max_length or rows > cache.num_slots:
        raise ValueError(f"{rows} rows of {span} positions do not fit {cache.num_slots} slots of {cache.max_length}")
    slots = torch.arange(rows, device=tokens_B.device) if slots_B is None else slots_B
    dtype = cache.keys.dtype
    bands = [(band, _one_mask(positions_B[band], dtype)) for band in _bands(lengths)]

    def cached(layer: int, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        keys[slots, :, positions_B] = new_keys[:, 0]
        values[slots, :, positions_B] = new_values[:, 0]
        mixed = []
        for band, mask in bands:
            of, end = band if slots_B is None else slots_B[band], max(lengths[band])
            mixed.append(attend(queries[band], keys[of, :, :end], values[of, :, :end], mask))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    rope = rotary_tables(config, positions_B[:, None], dtype)
    hidden = run_layers(params, config, embed(params, tokens_B[:, None]), rope, cached, projections)
    return project_to_vocab(params, hidden[:, 0], projections)


def _bands(lengths: list[int]) -> list[slice]:
    """Neighbouring rows that attend together, all of them to as many positions as the longest has.

    All rows, unless that computes a third too much (counting a call per layer as a few hundred positions).
    """
    rows = len(lengths)
    bands = [slice(first, min(first + _BAND_ROWS, rows)) for first in range(0, rows, _BAND_ROWS)]
    cost = sum(max(lengths[band]) * len(lengths[band]) + _BAND_POSITIONS for band in bands)
    return bands if 4 * cost < 3 * max(lengths) * rows else [slice(0, rows)]


def _one_mask(positions_B: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Mask of one query per row, (B, 1, 1, S); None when all rows have the same length."""
    allowed = torch.arange(int(positions_B.max()) + 1, device=positions_B.device)[None, :] <= positions_B[:, None]
    return None if bool(allowed.all()) else additive_mask(allowed, dtype)[:, None, None, :]
