"""Rows that hold a prompt once and its completions behind it, so that a group shares the prompt's computation.

A row is [prompt | completion 0 | completion 1 | ...] without gaps. Each completion continues the prompt's positions and
sees the prompt and itself, never its siblings. The last token of a completion is predicted but not fed. Attention costs
grow with the square of the row, so long completions of large groups belong in rows of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """Input of `training.packed_logprobs` for R rows of S positions; one entry of the T arrays per predicted token.

    The predicted tokens come in the order of the completions handed in (row by row, completion by completion).
    """

    tokens_RS: Tensor
    positions_RS: Tensor
    allowed_RSS: Tensor
    """True where the first position may attend to the second."""
    sources_T: Tensor
    """Flat index (row * S + position) of the hidden state that predicts the token."""
    targets_T: Tensor
    """The predicted token ids."""


def pack_rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]]) -> PackedRows:
    """Packs prompt r with its `completions[r]`. Raises ValueError for an empty prompt or an empty completion."""
    rows = [_lay_out(prompt, group) for prompt, group in zip(prompts, completions, strict=True)]
    if not rows:
        raise ValueError("there is nothing to pack")
    width = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), -1, np.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        positions[index, : len(row.tokens)] = row.positions
        segments[index, : len(row.tokens)] = row.segments
    sources = np.concatenate([np.asarray(row.sources, np.int64) + index * width for index, row in enumerate(rows)])
    targets = np.concatenate([np.asarray(row.targets, np.int64) for row in rows])
    seen, seer = segments[:, None, :], segments[:, :, None]
    allowed = ((seen == 0) | (seen == seer)) & np.tri(width, dtype=bool)
    return PackedRows(*(torch.from_numpy(array) for array in (tokens, positions, allowed, sources, targets)))


@dataclass
class _Row:
    """One row before padding; segment 0 is the prompt, i + 1 completion i."""

    tokens: list[int]
    positions: list[int]
    segments: list[int]
    sources: list[int]
    targets: list[int]


def _lay_out(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> _Row:
    start = len(prompt)
    if start == 0:
        raise ValueError("a prompt needs at least one token")
    row = _Row(list(prompt), list(range(start)), [0] * start, [], [])
    for index, completion in enumerate(completions):
        if len(completion) == 0:
            raise ValueError("a completion needs at least one token")
        fed = len(completion) - 1
        first = len(row.tokens)
        row.sources += [start - 1, *range(first, first + fed)]
        row.targets += completion
        row.tokens += completion[:fed]
        row.positions += range(start, start + fed)
        row.segments += [index + 1] * fed
    return row
