"""Values that cross the border between the engine's thread and its front doors. No torch, no protos."""

from dataclasses import dataclass, field, replace
from typing import Any

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Seed of one sample: a group's sample i draws exactly what a single request with this seed draws."""
    return (group_seed + sample_index * _GOLDEN) & _MASK


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, valid by construction of the parsers."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Tokens below that share of the likeliest one's probability are left out; 0 leaves none out."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    """Most likely tokens to report per position."""
    prompt_logprobs: int | None = None
    """Most likely tokens to report per prompt token beside its own; None reports nothing of the prompt."""


@dataclass(frozen=True)
class ComputedPrompt:
    """Keys and values of a prompt without its last token, and the broker's epoch of the weights that computed them."""

    kv: Any
    """A `reflux_model.cache.PrefixKV` of one row; opaque here."""
    epoch: int


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt, n samples."""

    request_id: str
    prompt_ids: tuple[int, ...]
    num_samples: int
    sampling: Sampling
    stream_tokens: bool = False
    """Deliver every token as it is drawn; otherwise only finished samples."""
    model: str = ""
    """Adapter that draws; empty is the engine's own model."""
    cache_salt: str = ""
    """Only prompts of the same salt share computed prefixes."""
    given: ComputedPrompt | None = None
    """What another engine has computed of the prompt; used if it comes from the weights that are current."""
    hand_over: bool = False
    """The first finished sample brings what was computed of the prompt."""


@dataclass(frozen=True)
class Span:
    """Generated tokens `start .. end-1` were drawn under weight `version`; their prefix's KV under `kv_version`."""

    version: int
    start: int
    end: int
    kv_version: int


@dataclass(frozen=True)
class TokenScore:
    """What the model says of one token at one position of a prompt."""

    logprob: float
    """Natural log, temperature 1."""
    rank: int
    """1 for the likeliest token."""


PromptScores = list[dict[int, TokenScore]]
"""One entry per prompt token after the first: the token itself and the likeliest ones, by id."""


@dataclass(frozen=True, kw_only=True)
class FinishedSample:
    """One completion."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    """Natural log, temperature 1, of the distribution before min-p, top-p and top-k."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    spans: list[Span]
    text: str | None = None
    """Set when stop strings were asked for: the text before the stop string."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_scores: PromptScores = field(default_factory=list)
    """Empty unless asked for."""
    computed: ComputedPrompt | None = None
    """Of the first sample of a request that asks to `hand_over`."""


@dataclass(frozen=True)
class TokenDelta:
    """One token of a running sample; only for requests with `stream_tokens`."""

    index: int
    token_id: int
    logprob: float
    top_logprobs: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The engine at one moment."""

    running: int
    waiting: int
    pending_tokens: int
    version: int
    epoch: int
    generated_tokens: int
    """Since the start."""
    prefilled_prompts: int
    """Since the start; once per group and weight version."""
    prefilled_tokens: int
    """Prompt tokens computed since the start."""
    reused_tokens: int
    """Prompt tokens that did not have to be computed, since another prompt began with them."""

    def with_waiting(self, waiting: int) -> "EngineLoad":
        """The same load with another number of waiting samples."""
        return replace(self, waiting=waiting)


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What a request may ask of the model; parsers check against it."""

    vocab_size: int
    max_model_len: int
    """Prompt and generated tokens together."""
    max_samples: int = 1024


class EngineStopped(Exception):
    """The engine's thread has ended; its message says why."""


class QueueFull(Exception):
    """The bounded queue cannot take the group now; the doors answer 429 or RESOURCE_EXHAUSTED."""
