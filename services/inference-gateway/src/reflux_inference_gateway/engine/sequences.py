"""One running sample: its request, its weight-version spans, and the text it watches for stop strings."""

from dataclasses import dataclass, field

from reflux_inference_gateway.engine.lanes import Lane
from reflux_inference_gateway.engine.stops import Decode, TextCursor
from reflux_inference_gateway.engine.types import ComputedPrompt, FinishedSample, GroupRequest, PromptScores, Span


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


@dataclass(eq=False)
class Sequence:
    """One seated sample. Only sequences with a cursor or with `stream_tokens` cost Python work per token."""

    request: GroupRequest
    index: int
    lane: Lane
    spans: SpanLog
    cursor: TextCursor | None = None
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_scores: PromptScores = field(default_factory=list)
    filled: int | None = 0
    """Positions whose keys and values are the current weights', while not all are that it needs to decode; None then.
    The last token is not among them: the next decode step feeds it."""
    turn: int = 0
    """Number of the swap or the admission since which it waits to be filled."""
    begun: bool = False
    """True once it may have decoded: what is filled after that is filled again, because of a swap."""
    lingering: bool = False
    """True while its keys and values are still those of the weights before the last swap, all of them."""
    computed: ComputedPrompt | None = None
    """Its prompt's keys and values, when they are to be handed over."""
    leader: "Sequence | None" = None
    """Another sequence that is being filled, and whose first `shared` positions are also this one's."""
    shared: int = 0

    @property
    def ready(self) -> bool:
        """True when it may decode under the current weights."""
        return self.filled is None

    @property
    def stale(self) -> bool:
        """True when it has decoded, and must not under the current weights before it is filled again."""
        return self.begun and not self.ready

    @property
    def salt(self) -> str:
        """Only samples of the same one may share computed prompts."""
        return self.lane.salt(self.request.cache_salt)

    @property
    def prompt_end(self) -> int:
        """Positions of the prompt that are filled before the first decode step."""
        return len(self.request.prompt_ids) - 1

    def outdate(self, turn: int) -> None:
        """No key or value is the current weights' any more."""
        self.lingering = self.ready
        self.turn = turn if self.ready else self.turn
        self.filled = 0

    def fill(self, generated: int) -> None:
        """All keys and values that it needs are those of its lane's weights."""
        self.filled, self.begun, self.lingering, self.leader = None, True, False, None
        self.spans.swap(generated, self.lane.weights.version, kept_kv=False)

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
            prompt_scores=self.prompt_scores,
            computed=self.computed,
        )


def start_sequence(request: GroupRequest, index: int, lane: Lane, turn: int, decode: Decode | None) -> Sequence:
    """A sequence without tokens that waits to be filled since `turn`; `decode` is needed for stop strings only."""
    stops = request.sampling.stops
    if stops and decode is None:
        raise ValueError("stop strings need a tokenizer")
    cursor = TextCursor(decode, stops) if stops and decode is not None else None
    version = lane.weights.version
    return Sequence(request, index, lane, SpanLog(version, version), cursor, turn=turn)
