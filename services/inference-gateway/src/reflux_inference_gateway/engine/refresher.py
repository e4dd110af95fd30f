"""Computes stale keys and values again, a chunk at a time."""

from collections.abc import Callable, Sequence

from reflux_inference_gateway.engine.refresh import Pace, Piece, Stale, next_pieces
from reflux_inference_gateway.engine.rows import Rows
from reflux_inference_gateway.engine.sequences import Sequence as Sample
from reflux_model.cache import SlotCache
from reflux_model.config import ModelConfig
from reflux_model.inference import Segment, extend
from reflux_model.parameters import Parameters


class Refresher:
    """Owns the size of chunks; the samples know themselves how far they are."""

    def __init__(
        self, config: ModelConfig, cache: SlotCache, rows: Rows, pace: Pace, clock: Callable[[], float]
    ) -> None:
        self.pace = pace
        self._config, self._cache, self._rows, self._clock = config, cache, rows, clock
        self._swaps = 0

    def outdate(self, samples: Sequence[Sample]) -> None:
        """New weights: all keys and values are stale."""
        self._swaps += 1
        for sample in samples:
            sample.outdate(self._swaps)

    def stale(self, samples: Sequence[Sample]) -> list[Stale]:
        """The rows that must not decode under the current weights; `samples` are those of rows 0, 1, ..."""
        return [
            # The last token is left out: the next decode step feeds it and writes its key and value.
            Stale(row, sample.stale_since, sample.refreshed, int(self._rows.positions_B[row]))
            for row, sample in enumerate(samples)
            if sample.refreshed is not None
        ]

    def advance(self, params: Parameters, version: int, samples: Sequence[Sample], stale: list[Stale]) -> int:
        """Computes the next chunk under the current weights; returns its number of tokens."""
        pieces = next_pieces(stale, self.pace.tokens(len(samples)))
        segments = self._segments(samples, pieces)
        count = sum(len(segment.tokens) for segment in segments)
        start = self._clock()
        extend(params, self._config, segments, self._cache)
        self.pace.refreshed(count, self._clock() - start)
        for piece in pieces:
            sample = samples[piece.row]
            sample.lingering = False
            sample.refreshed = None if piece.last else piece.end
            if piece.last:
                sample.spans.swap(int(self._rows.generated_B[piece.row]), version, kept_kv=False)
        return count

    def _segments(self, samples: Sequence[Sample], pieces: list[Piece]) -> list[Segment]:
        tokens, _ = self._rows.outputs([piece.row for piece in pieces])
        segments = []
        for piece, generated in zip(pieces, tokens, strict=True):
            text = (*samples[piece.row].request.prompt_ids, *generated)
            segments.append(Segment(piece.row, piece.start, text[piece.start : piece.end]))
        return segments
