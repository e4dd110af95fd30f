"""From groups to micro-batches of flat arrays; token weights are fixed on the whole batch before it is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reflux_model.packing import PackedRows, pack_rows
from reflux_trainer.algo.aggregation import token_weights
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec


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


def micro_batches(groups: Sequence[GroupData], loss: LossSpec, limit: int) -> Iterator[MicroBatch]:
    """Cuts a batch into parts of at most `limit` completions (0 = one part); a split group repeats its prompt.

    Groups of similar length come together, because the rows of a part are padded to its longest.
    """
    ordered = sorted(groups, key=_row_length)
    masks = [_mask(completion) for group in ordered for completion in group.completions]
    weights = token_weights(masks, loss.aggregation, constant_length=loss.constant_length)
    entries = iter(zip(masks, weights, strict=True))
    for part in _parts(ordered, limit):
        completions = [completion for group in part for completion in group.completions]
        chosen = [next(entries) for _ in completions]
        yield _micro_batch(part, completions, [mask for mask, _ in chosen], [weight for _, weight in chosen])


def pack_groups(groups: Sequence[GroupData]) -> PackedRows:
    """Rows of the groups without anything that a loss needs."""
    return pack_rows(
        [group.prompt for group in groups],
        [[completion.token_ids for completion in group.completions] for group in groups],
    )


def parts_for_scoring(groups: Sequence[GroupData], limit: int) -> Iterator[list[GroupData]]:
    """The same cuts for a forward pass."""
    return _parts(groups, limit)


def _row_length(group: GroupData) -> int:
    return len(group.prompt) + sum(len(completion.token_ids) - 1 for completion in group.completions)


def _parts(groups: Sequence[GroupData], limit: int) -> Iterator[list[GroupData]]:
    if limit <= 0:
        yield list(groups)
        return
    part: list[GroupData] = []
    room = limit
    for group in groups:
        if part and len(group.completions) > room:
            yield part
            part, room = [], limit
        for start in range(0, len(group.completions), limit):
            piece = group.completions[start : start + limit]
            if len(piece) > room:
                yield part
                part, room = [], limit
            part.append(GroupData(group.prompt, piece))
            room -= len(piece)
    if part:
        yield part


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
