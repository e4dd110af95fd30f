"""From groups to micro-batches of flat arrays; token weights are fixed on the whole batch before it is cut."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reflux_model.packing import PackedRows, pack_rows
from reflux_trainer.algo.aggregation import token_weights
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec

MAX_ATTENTION_CELLS = 1 << 22
"""Bound of rows * width^2 of one part: the mask alone takes 5 bytes per cell."""
MICRO_BATCH_TOKENS = 1 << 11
"""Tokens that one part feeds, unless a single completion has more; small parts have less padding."""


@dataclass(frozen=True)
class Placed:
    """A group, or a part of one, with the place of each of its completions in the batch."""

    group: GroupData
    places: tuple[int, ...]

    @property
    def row_length(self) -> int:
        """Tokens that it feeds: the prompt once, and each completion but its last token."""
        return len(self.group.prompt) + sum(len(each.token_ids) - 1 for each in self.group.completions)


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows and, per predicted token, what the loss needs; log-probs are NaN where there are none."""

    placed: tuple[Placed, ...]
    packed: PackedRows
    sampler_logprobs_T: Tensor
    proximal_logprobs_T: Tensor
    reference_logprobs_T: Tensor
    returns_T: Tensor
    values_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    weights_T: Tensor
    completion_T: Tensor
    places: tuple[int, ...]
    """Place in the batch of each completion."""
    lengths: tuple[int, ...]
    """Tokens of each completion."""


def micro_batches(groups: Sequence[GroupData], loss: LossSpec, limit: int = 0) -> Iterator[MicroBatch]:
    """Cuts a batch into parts of at most `limit` completions (0 = no such bound); a split group repeats its prompt.

    Memory is bounded whatever the batch: MAX_ATTENTION_CELLS and MICRO_BATCH_TOKENS hold for all parts but those of a
    single completion. Groups of similar length come together, because the rows of a part are as wide as its longest.
    """
    completions = [completion for group in groups for completion in group.completions]
    masks = [mask_of(completion) for completion in completions]
    weights = token_weights(masks, loss.aggregation, constant_length=loss.constant_length)
    for part in parts_of(groups, limit):
        yield _micro_batch(part, masks, weights)


def parts_of(groups: Sequence[GroupData], limit: int = 0) -> Iterator[list[Placed]]:
    """The same cuts without anything that a loss needs."""
    part: list[Placed] = []
    completions = width = tokens = 0
    for piece in (piece for placed in _ordered(groups) for piece in _pieces(placed, limit)):
        longest = max(width, piece.row_length)
        crowded = (
            0 < limit < completions + len(piece.places)
            or tokens + piece.row_length > MICRO_BATCH_TOKENS
            or (len(part) + 1) * longest**2 > MAX_ATTENTION_CELLS
        )
        if part and crowded:
            yield part
            part, completions, width, tokens = [], 0, 0, 0
        part.append(piece)
        completions += len(piece.places)
        tokens += piece.row_length
        width = max(width, piece.row_length)
    if part:
        yield part


def pack_placed(part: Sequence[Placed]) -> PackedRows:
    """Rows of a part."""
    groups = [placed.group for placed in part]
    return pack_rows(
        [group.prompt for group in groups],
        [[completion.token_ids for completion in group.completions] for group in groups],
        [[completion.fed_ids for completion in group.completions] for group in groups],
    )


def mask_of(completion: CompletionData) -> NDArray[np.bool_]:
    """True where a token counts: in the mask, with a weight that is not 0."""
    counts = np.asarray(completion.mask, bool) if len(completion.mask) else np.ones(len(completion.token_ids), bool)
    return counts & (np.asarray(completion.weights) != 0) if len(completion.weights) else counts


def _ordered(groups: Sequence[GroupData]) -> list[Placed]:
    placed, first = [], 0
    for group in groups:
        placed.append(Placed(group, tuple(range(first, first + len(group.completions)))))
        first += len(group.completions)
    return sorted(placed, key=lambda each: each.row_length)


def _pieces(placed: Placed, limit: int) -> Iterator[Placed]:
    """Cuts a group that has too many completions, or whose row would be too long, into several with its prompt."""
    group = placed.group
    most_fed = min(math.isqrt(MAX_ATTENTION_CELLS), MICRO_BATCH_TOKENS) - len(group.prompt)
    taken: list[int] = []
    length = 0
    for index, completion in enumerate(group.completions):
        size = len(completion.token_ids)
        if taken and (len(taken) == limit or length + size > most_fed):
            yield _piece(placed, taken)
            taken, length = [], 0
        taken.append(index)
        length += size
    yield _piece(placed, taken)


def _piece(placed: Placed, chosen: Sequence[int]) -> Placed:
    completions = [placed.group.completions[index] for index in chosen]
    return Placed(replace(placed.group, completions=completions), tuple(placed.places[index] for index in chosen))


def _micro_batch(
    part: Sequence[Placed], masks: Sequence[NDArray[np.bool_]], weights: Sequence[NDArray[np.float64]]
) -> MicroBatch:
    completions = [completion for placed in part for completion in placed.group.completions]
    places = tuple(place for placed in part for place in placed.places)
    lengths = tuple(len(completion.token_ids) for completion in completions)
    return MicroBatch(
        placed=tuple(part),
        packed=pack_placed(part),
        sampler_logprobs_T=_column([completion.sampler_logprobs for completion in completions], lengths, np.nan),
        proximal_logprobs_T=_column([completion.proximal_logprobs for completion in completions], lengths, np.nan),
        reference_logprobs_T=_column([completion.reference_logprobs for completion in completions], lengths, np.nan),
        returns_T=_column([completion.returns for completion in completions], lengths, np.nan),
        values_T=_column([completion.values for completion in completions], lengths, np.nan),
        advantages_T=_column([_advantages(completion) for completion in completions], lengths, 1.0),
        mask_T=_column([masks[place] for place in places], lengths, 1.0),
        weights_T=_column([weights[place] for place in places], lengths, 1.0)
        * _column([completion.weights for completion in completions], lengths, 1.0),
        completion_T=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        places=places,
        lengths=lengths,
    )


def _advantages(completion: CompletionData) -> Sequence[float]:
    return completion.advantages or [completion.advantage] * len(completion.token_ids)


def _column(rows: Sequence[Sequence[float] | NDArray], lengths: Sequence[int], default: float) -> Tensor:
    """The rows behind each other in float32; an empty row takes the default for all its tokens."""
    filled = [row if len(row) else np.full(length, default) for row, length in zip(rows, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(filled).astype(np.float32))
