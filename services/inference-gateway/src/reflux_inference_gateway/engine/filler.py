"""Computes the keys and values that rows lack, a chunk at a time: prompts, and everything after a swap."""

from collections.abc import Callable, Sequence

from torch import Tensor

from reflux_inference_gateway.engine.lanes import Lanes, projections
from reflux_inference_gateway.engine.prompt_scores import score_tokens
from reflux_inference_gateway.engine.prompts import Prompts
from reflux_inference_gateway.engine.refresh import Pace, Piece, Unfilled, next_pieces
from reflux_inference_gateway.engine.rows import Rows
from reflux_inference_gateway.engine.sequences import Sequence as Sample
from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import Segment, extend

_MOST_STALE_TOKENS = 4096
"""Of a chunk: bounds the memory of its activations."""


class Filler:
    """Owns the size of chunks; the samples know themselves how far they are."""

    def __init__(
        self,
        config: ModelConfig,
        cache: SlotCache,
        rows: Rows,
        prompts: Prompts,
        lanes: Lanes,
        *,
        chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """A chunk has at most `chunk_tokens` tokens of prompts; while rows are stale it has as many as `pace` says."""
        self.pace = Pace(_MOST_STALE_TOKENS)
        self.prompt_tokens = 0
        """Computed since the start, without those that a swap made stale after the first decode step."""
        self._chunk_tokens = chunk_tokens
        self._config, self._cache, self._rows, self._prompts, self._clock = config, cache, rows, prompts, clock
        self._lanes = lanes
        self._turn = 0

    def next_turn(self) -> int:
        """Number of a swap or an admission: rows that wait are filled in this order."""
        self._turn += 1
        return self._turn

    def advance(self, samples: Sequence[Sample]) -> None:
        """Computes the next chunk for the samples of rows 0, 1, ..."""
        for one in self._unfilled(samples):
            if one.done == one.length:
                self._complete(one.row, samples)
        waiting = self._unfilled(samples)
        if not waiting:
            return
        stale = any(samples[one.row].stale for one in waiting)
        pieces = next_pieces(waiting, self.pace.tokens(len(samples)) if stale else self._chunk_tokens)
        segments = self._segments(samples, pieces)
        start = self._clock()
        lanes = [samples[segment.slot].lane for segment in segments for _ in segment.tokens]
        routed = projections([lane.weights for lane in lanes])
        hidden_TE = extend(self._lanes.own.weights.params, self._config, segments, self._cache, routed)
        self.pace.refreshed(len(hidden_TE), self._clock() - start)
        for segment in segments:
            sample, tokens = samples[segment.slot], len(segment.tokens)
            if sample.stale:
                sample.lane.pause.refreshed(tokens)
            else:
                self.prompt_tokens += tokens
        parts = hidden_TE.split([len(segment.tokens) for segment in segments])
        for piece, part in zip(pieces, parts, strict=True):
            self._note(samples[piece.row], piece, part)
            if piece.last:
                self._complete(piece.row, samples)

    def pending_tokens(self, samples: Sequence[Sample]) -> int:
        """Tokens that are still to be computed before all of the samples decode."""
        return sum(one.length - one.done for one in self._unfilled(samples))

    def _unfilled(self, samples: Sequence[Sample]) -> list[Unfilled]:
        return [
            # The last token is left out: the next decode step feeds it and writes its key and value.
            Unfilled(row, sample.turn, sample.filled, int(self._rows.positions_B[row]))
            for row, sample in enumerate(samples)
            if sample.filled is not None and sample.leader is None
        ]

    def _segments(self, samples: Sequence[Sample], pieces: list[Piece]) -> list[Segment]:
        tokens, _ = self._rows.outputs([piece.row for piece in pieces])
        segments = []
        for piece, generated in zip(pieces, tokens, strict=True):
            text = (*samples[piece.row].request.prompt_ids, *generated)
            segments.append(Segment(piece.row, piece.start, text[piece.start : piece.end]))
        return segments

    def _note(self, sample: Sample, piece: Piece, hidden_TE: Tensor) -> None:
        sample.lingering, sample.filled = False, piece.end
        count = sample.request.sampling.prompt_logprobs
        if count is not None and not sample.begun:
            predicted = sample.request.prompt_ids[piece.start + 1 : piece.end + 1]
            known = sample.prompt_scores if piece.start else []
            base, routed = self._lanes.own.weights.params, projections([sample.lane.weights])
            sample.prompt_scores = known + score_tokens(base, routed, hidden_TE, predicted, count)

    def _complete(self, row: int, samples: Sequence[Sample]) -> None:
        sample = samples[row]
        first = not sample.begun
        sample.fill(int(self._rows.generated_B[row]))
        self._prompts.filled(sample, row, first=first)
        followers = [(at, one) for at, one in enumerate(samples) if one.leader is sample]
        self._prompts.share(row, sample, followers)
        for at, one in followers:
            if one.request is sample.request:
                one.fill(0)
            elif one.filled == one.prompt_end:
                self._complete(at, samples)
