"""One running sample: its request, its weight-version spans, and the text it watches for stop strings."""

from dataclasses import dataclass, field

from reflux_inference_gateway.engine.stops import Decode, TextCursor
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, Span


@dataclass
class SpanLog:
    """Owns the spans of one sequence: which weights drew which generated tokens."""

    version: int
    kv_version: int
    start: int = 0
    closed: list[Span] = field(default_factory=list)

    def swap(self, generated: int, version: int, *, kept_kv: bool) -> None:
        """New weights draw the tokens from position `generated` on; with `kept_kv` the old keys and values stay."""
        self._close(generated)
        self.start, self.version = generated, version
        if not kept_kv:
            self.kv_version = version

    def finish(self, generated: int) -> list[Span]:
        """All spans, in order and without gaps."""
        self._close(generated)
        self.start = generated
        return self.closed

    def _close(self, generated: int) -> None:
        if generated > self.start:
            self.closed.append(Span(self.version, self.start, generated, self.kv_version))


@dataclass
class Sequence:
    """One seated sample. Only sequences with a cursor or with `stream_tokens` cost Python work per token."""

    request: GroupRequest
    index: int
    spans: SpanLog
    cursor: TextCursor | None = None
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    refreshed: int | None = None
    """Positions whose keys and values are the current weights', while not all are; None when all are."""
    stale_since: int = 0
    """Number of the swap that made it stale."""
    lingering: bool = False
    """True while its keys and values are still those of the weights before the last swap, all of them."""

    @property
    def stale(self) -> bool:
        """True while it must not decode under the current weights."""
        return self.refreshed is not None

    def outdate(self, swap_number: int) -> None:
        """No key or value is the current weights' any more."""
        self.lingering = not self.stale
        self.stale_since = self.stale_since if self.stale else swap_number
        self.refreshed = 0

    @property
    def watched(self) -> bool:
        """True when every token must be looked at."""
        sampling = self.request.sampling
        return self.cursor is not None or self.request.stream_tokens or sampling.top_logprobs > 0

    def finish(self, token_ids: list[int], logprobs: list[float], reason: str) -> FinishedSample:
        """The finished sample; a stop string that came with the last token counts as "stop"."""
        text = None
        if self.cursor is not None:
            self.cursor.finish()
            text = self.cursor.text
            if self.cursor.stopped and reason == "length":
                reason = "stop"
        return FinishedSample(
            index=self.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            spans=self.spans.finish(len(token_ids)),
            text=text,
            top_logprobs=self.top_logprobs,
        )


def start_sequence(request: GroupRequest, index: int, version: int, decode: Decode | None) -> Sequence:
    """A sequence without tokens; `decode` is needed for stop strings only."""
    stops = request.sampling.stops
    if stops and decode is None:
        raise ValueError("stop strings need a tokenizer")
    cursor = TextCursor(decode, stops) if stops and decode is not None else None
    return Sequence(request, index, SpanLog(version, version), cursor)
