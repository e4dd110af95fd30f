"""Values that travel into and out of the learner's primitives, apart from protos and torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reflux_trainer.algo.aggregation import Aggregation

LossName = Literal[
    "cross_entropy",
    "reinforce",
    "ppo",
    "dual_clip",
    "cispo",
    "gspo",
    "gspo_token",
    "importance_sampling",
]
LOSSES: tuple[LossName, ...] = get_args(LossName)


@dataclass(frozen=True)
class CompletionData:
    """One completion to learn from; the three sequences have one entry per token.

    `sampler_logprobs` are what the sampler reported (lp_mu) and empty for supervised data; an empty `mask` counts every
    token. `advantage` weighs every token; for cross_entropy it is the weight of the example.
    """

    token_ids: Sequence[int]
    sampler_logprobs: Sequence[float] = ()
    advantage: float = 1.0
    mask: Sequence[bool] = ()


@dataclass(frozen=True)
class GroupData:
    """Completions that share a prompt; the prompt is computed once."""

    prompt: Sequence[int]
    completions: Sequence[CompletionData]


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Which loss, its constants and its aggregation over the whole batch of one ForwardBackward."""

    name: LossName
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    """Width below 1: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    dual_clip_bound: float = 3.0
    """dual_clip only: for negative advantages the loss never exceeds bound * |advantage|."""
    tis_cap: float = 0.0
    """Above 0: the proximal policy is the present one and each token's loss is multiplied by
    min(exp(lp_old - lp_mu), cap). 0: the sampler's policy is the proximal one."""
    constant_length: int = 0
    """Length in tokens that aggregation "constant" divides by."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """How to apply the accumulated gradient (AdamW); the schedule of the learning rate is the caller's."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """0 leaves the gradient as it is."""
    reset_optimizer: bool = False
    """True forgets the moments first, as at the start of another stage."""


@dataclass(frozen=True)
class BatchFigures:
    """What one ForwardBackward saw; means are over the tokens that count."""

    loss: float
    tokens: int
    entropy: float
    """Nats."""
    kl_sample_train: float
    """Mean of lp_mu - lp: an estimate of KL(sampler || learner)."""
    max_logprob_gap: float
    """Largest |lp_mu - lp|."""
    clip_fraction: float
    """Share of tokens whose gradient the clip took away (or bounded, for cispo)."""
    seconds: float


@dataclass(frozen=True)
class StepFigures:
    """What one OptimStep did."""

    grad_norm: float
    """Before the limit; NaN or infinity when the step was refused for it."""
    version: int
    """Optimizer steps applied since the model was created."""
    applied: bool
    """False: the loss or the gradient was not finite, so the gradient was dropped and the weights stayed."""
    seconds: float
