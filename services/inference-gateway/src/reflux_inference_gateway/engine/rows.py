"""Per-row tensors of the running batch: what the decode loop reads and writes without touching Python per sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux_inference_gateway.engine.types import Sampling, sample_seed
from reflux_model.sampling import Sampled, SamplingParams, sample, seeds_tensor, top_logprobs

RowIndex = slice | Tensor
"""Neighbouring rows, or any distinct ones (int64)."""

_NO_TOKEN = -1


@dataclass(frozen=True)
class Drawn:
    """Tokens of one step, row by row, and which rows (absolute) have ended."""

    tokens: Sampled
    by_stop: list[int]
    by_length: list[int]
    top_ids: Tensor | None = None
    top_values: Tensor | None = None

    def top_of(self, offset: int, count: int) -> dict[int, float]:
        """The `count` most likely tokens at one row of the step, with log-probs at temperature 1, best first."""
        if not count or self.top_ids is None or self.top_values is None:
            return {}
        ids, values = self.top_ids[offset, :count].tolist(), self.top_values[offset, :count].tolist()
        return dict(zip(ids, values, strict=True))


class Rows:
    """Owns the sampling state and the output of every row; rows are dense, as the batcher keeps them."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        """Allocates for `max_rows` sequences of up to `max_length` generated tokens."""
        self.last_B = torch.zeros(max_rows, dtype=torch.int64)
        self.positions_B = torch.zeros(max_rows, dtype=torch.int64)
        self.generated_B = torch.zeros(max_rows, dtype=torch.int64)
        self.limits_B = torch.zeros(max_rows, dtype=torch.int64)
        self._temperature_B = torch.zeros(max_rows)
        self._top_p_B = torch.ones(max_rows)
        self._top_k_B = torch.zeros(max_rows, dtype=torch.int64)
        self._min_p_B = torch.zeros(max_rows)
        self._seeds_B = torch.zeros(max_rows, dtype=torch.int64)
        self._top_count_B = torch.zeros(max_rows, dtype=torch.int64)
        self._stops_BS = torch.full((max_rows, 1), _NO_TOKEN, dtype=torch.int64)
        self.tokens_BT = torch.zeros((max_rows, max_length), dtype=torch.int64)
        self.logprobs_BT = torch.zeros((max_rows, max_length))
        self._indices = torch.arange(max_rows)

    def seat(
        self,
        first_row: int,
        count: int,
        first_sample: int,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
    ) -> None:
        """Prepares rows for samples `first_sample ..` of one group: the next decode step feeds the prompt's last token,
        and the token that it draws gets position `len(prompt)`.
        """
        rows = slice(first_row, first_row + count)
        self.last_B[rows] = prompt[-1]
        self.positions_B[rows] = len(prompt) - 1
        self.generated_B[rows] = 0
        self.limits_B[rows] = sampling.max_tokens
        self._temperature_B[rows] = sampling.temperature
        self._top_p_B[rows] = sampling.top_p
        self._top_k_B[rows] = sampling.top_k
        self._min_p_B[rows] = sampling.min_p
        self._top_count_B[rows] = sampling.top_logprobs
        seeds = [sample_seed(sampling.seed, first_sample + offset) for offset in range(count)]
        self._seeds_B[rows] = seeds_tensor(seeds)
        self._widen_stops(len(stop_ids))
        self._stops_BS[rows] = _NO_TOKEN
        if stop_ids:
            self._stops_BS[rows, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)

    def draw(self, logits_BV: Tensor, rows: RowIndex) -> Drawn:
        """Samples the next token of rows, stores it, and says which of them (absolute) ended."""
        self.positions_B[rows] += 1
        params = SamplingParams(
            self._temperature_B[rows],
            self._top_k_B[rows],
            self._top_p_B[rows],
            self._min_p_B[rows],
            self._seeds_B[rows],
        )
        drawn = sample(logits_BV, params, self.positions_B[rows])
        generated, index = self.generated_B[rows], self._indices[rows]
        self.last_B[rows] = drawn.tokens_B
        self.tokens_BT[index, generated] = drawn.tokens_B
        self.logprobs_BT[index, generated] = drawn.logprobs_B
        self.generated_B[rows] += 1
        stopped = (drawn.tokens_B[:, None] == self._stops_BS[rows]).any(1)
        by_stop = index[stopped].tolist()
        by_length = index[self.generated_B[rows] >= self.limits_B[rows]].tolist()
        top = int(self._top_count_B[rows].max())
        if not top:
            return Drawn(drawn, by_stop, by_length)
        return Drawn(drawn, by_stop, by_length, *top_logprobs(logits_BV, top))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies whole rows; sources and targets are disjoint."""
        for tensor in (
            self.last_B,
            self.positions_B,
            self.generated_B,
            self.limits_B,
            self._temperature_B,
            self._top_p_B,
            self._top_k_B,
            self._min_p_B,
            self._seeds_B,
            self._top_count_B,
            self._stops_BS,
            self.tokens_BT,
            self.logprobs_BT,
        ):
            tensor[targets] = tensor[sources]

    def outputs(self, rows: list[int]) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and log-probs of rows, cut to what each has generated."""
        lengths = self.generated_B[rows].tolist()
        longest = max(lengths, default=0)
        tokens = self.tokens_BT[rows, :longest].tolist()
        logprobs = self.logprobs_BT[rows, :longest].tolist()
        cut_tokens = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        return cut_tokens, [row[:length] for row, length in zip(logprobs, lengths, strict=True)]

    def remaining_tokens(self, count: int) -> int:
        """Tokens that the first `count` rows may still generate."""
        return int((self.limits_B[:count] - self.generated_B[:count]).sum())

    def _widen_stops(self, width: int) -> None:
        missing = width - self._stops_BS.shape[1]
        if missing > 0:
            filler = torch.full((self._stops_BS.shape[0], missing), _NO_TOKEN, dtype=torch.int64)
            self._stops_BS = torch.cat([self._stops_BS, filler], 1)
