"""From groups to micro-batches of flat arrays; token weights are fixed on the whole batch before it is cut."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reflux_model.packing import PackedRows, pack_rows
from reflux_trainer.algo.aggregation import token_weights
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec

MAX_ATTENTION_CELLS = 1 << 22
"""Bound of rows * width^2 of one part: the mask alone takes 5 bytes per cell."""
MAX_LOGITS = 1 << 26
"""Bound of predicted tokens * vocabulary of one part."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows and, per predicted token, what the loss needs."""

    packed: PackedRows
    sampler_logprobs_T: Tensor
    """NaN where the sampler reported none."""
    advantages_T: Tensor
    mask_T: Tensor
    weights_T: Tensor
    completion_T: Tensor


def micro_batches(groups: Sequence[GroupData], loss: LossSpec, limit: int, vocab_size: int) -> Iterator[MicroBatch]:
    """Cuts a batch into parts of at most `limit` completions (0 = no such bound); a split group repeats its prompt.

    Memory is bounded whatever the batch: MAX_ATTENTION_CELLS and MAX_LOGITS hold for all parts but those of a single
    completion. Groups of similar length come together, because the rows of a part are padded to its longest.
    """
    ordered = sorted(groups, key=_row_length)
    masks = [_mask(completion) for group in ordered for completion in group.completions]
    weights = token_weights(masks, loss.aggregation, constant_length=loss.constant_length)
    entries = iter(zip(masks, weights, strict=True))
    for part in _parts(ordered, limit, vocab_size):
        completions = [completion for group in part for completion in group.completions]
        chosen = [next(entries) for _ in completions]
        yield _micro_batch(part, completions, [mask for mask, _ in chosen], [weight for _, weight in chosen])


def pack_groups(groups: Sequence[GroupData]) -> PackedRows:
    """Rows of the groups without anything that a loss needs."""
    return pack_rows(
        [group.prompt for group in groups],
        [[completion.token_ids for completion in group.completions] for group in groups],
    )


def parts_for_scoring(groups: Sequence[GroupData], limit: int, vocab_size: int) -> Iterator[list[GroupData]]:
    """The same cuts for a forward pass."""
    return _parts(groups, limit, vocab_size)


def _row_length(group: GroupData) -> int:
    return len(group.prompt) + sum(len(completion.token_ids) - 1 for completion in group.completions)


def _parts(groups: Sequence[GroupData], limit: int, vocab_size: int) -> Iterator[list[GroupData]]:
    part: list[GroupData] = []
    completions = width = tokens = 0
    most_tokens = MAX_LOGITS // vocab_size
    for piece in (piece for group in groups for piece in _pieces(group, limit, most_tokens)):
        longest = max(width, _row_length(piece))
        crowded = (
            0 < limit < completions + len(piece.completions)
            or most_tokens < tokens + _tokens(piece)
            or (len(part) + 1) * longest**2 > MAX_ATTENTION_CELLS
        )
        if part and crowded:
            yield part
            part, completions, width, tokens = [], 0, 0, 0
        part.append(piece)
        completions += len(piece.completions)
        tokens += _tokens(piece)
        width = max(width, _row_length(piece))
    if part:
        yield part


def _pieces(group: GroupData, limit: int, most_tokens: int) -> Iterator[GroupData]:
    """Cuts a group that has too many completions, or whose row would be too long, into several with its prompt."""
    most_fed = min(math.isqrt(MAX_ATTENTION_CELLS) - len(group.prompt), most_tokens)
    taken: list[CompletionData] = []
    length = 0
    for completion in group.completions:
        size = len(completion.token_ids)
        if taken and (len(taken) == limit or length + size > most_fed):
            yield GroupData(group.prompt, taken)
            taken, length = [], 0
        taken.append(completion)
        length += size
    yield GroupData(group.prompt, taken)


def _tokens(group: GroupData) -> int:
    return sum(len(completion.token_ids) for completion in group.completions)


def _micro_batch(
    part: Sequence[GroupData],
    completions: Sequence[CompletionData],
    masks: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
) -> MicroBatch:
    lengths = [len(completion.token_ids) for completion in completions]
    sampler = [completion.sampler_logprobs or [np.nan] * len(completion.token_ids) for completion in completions]
    advantages = np.repeat([completion.advantage for completion in completions], lengths)
    return MicroBatch(
        packed=pack_groups(part),
        sampler_logprobs_T=_floats(np.concatenate(sampler)),
        advantages_T=_floats(advantages),
        mask_T=_floats(np.concatenate(masks)),
        weights_T=_floats(np.concatenate(weights)),
        completion_T=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
    )


def _floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _mask(completion: CompletionData) -> np.ndarray:
    if len(completion.mask):
        return np.asarray(completion.mask, bool)
    return np.ones(len(completion.token_ids), bool)
