"""Values that travel into and out of the learner's primitives, apart from protos and torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reflux_trainer.algo.aggregation import Aggregation
from reflux_trainer.algo.corrections import Level
from reflux_trainer.algo.kl import Estimator

LossName = Literal[
    "cross_entropy",
    "reinforce",
    "ppo",
    "dual_clip",
    "cispo",
    "gspo",
    "gspo_token",
    "importance_sampling",
    "decoupled_ppo",
    "dro",
]
LOSSES: tuple[LossName, ...] = get_args(LossName)


@dataclass(frozen=True)
class CompletionData:
    """One completion to learn from; sequences have one entry per token, empty ones take their default.

    `sampler_logprobs` are what the sampler reported (lp_mu) and empty for supervised data; an empty `mask` counts every
    token. `advantage` weighs every token; for cross_entropy it is the weight of the example.
    """

    token_ids: Sequence[int]
    sampler_logprobs: Sequence[float] = ()
    advantage: float = 1.0
    mask: Sequence[bool] = ()
    advantages: Sequence[float] = ()
    """Per token, in the place of `advantage`."""
    weights: Sequence[float] = ()
    """Factor of each token's loss."""
    proximal_logprobs: Sequence[float] = ()
    """Of the policy that the ratio is taken to (lp_old), where it is neither the sampler nor the present one."""
    reference_logprobs: Sequence[float] = ()
    """Of the frozen policy of the KL term (lp_ref)."""
    returns: Sequence[float] = ()
    """What the critic's values are to be, where there is one."""
    values: Sequence[float] = ()
    """The critic's values at the start of the step, which its clip is around."""
    fed_ids: Sequence[int] = ()
    """What the model reads after the prompt, one less than `token_ids`; empty: `token_ids` themselves but the last."""


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
    """Above 0: each token's loss is multiplied by min(exp(lp_old - lp_mu), cap)."""
    mis_low: float = 0.0
    mis_high: float = 0.0
    """Above 0: the loss is multiplied by exp(lp_old - lp_mu) where that is from mis_low to mis_high, by 0 elsewhere."""
    correction_level: Level = "token"
    """Whether these weights are per token, or one for each completion."""
    kl_coefficient: float = 0.0
    """Share of the KL to the reference in the loss; tokens without `reference_logprobs` have none."""
    kl_estimator: Estimator = "k3"
    own_reference: bool = False
    """Tokens without `reference_logprobs` take those of the learner's reference (`Learner.reference`)."""
    value_coefficient: float = 0.0
    """Above 0: weight of the critic's loss on the tokens that have `returns`."""
    value_clip: float = 0.0
    """Above 0: how far a value counts as moved from the one at the start of the step."""
    dro_beta: float = 0.05
    """dro only: weight of the squared distance to the sampler."""
    constant_length: int = 0
    """Length in tokens that aggregation "constant" divides by."""

    @property
    def corrected(self) -> bool:
        """Whether losses are weighted for the sampler's being another policy."""
        return self.tis_cap > 0 or self.mis_high > 0

    @property
    def decoupled(self) -> bool:
        """Whether the proximal policy is the present one where none is given, rather than the sampler."""
        return self.corrected or self.name == "decoupled_ppo"


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
    critic_learning_rate: float = 0.0
    """Of the value head, where there is one."""
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
    value_loss: float = 0.0
    """Of the critic, before its coefficient."""
    explained_variance: float = 0.0
    """1 - Var(return - value) / Var(return) of the values at the start of the step; 0 where there are none."""
    kl_reference: float = 0.0
    """Mean of the estimate k3 over the tokens that have a reference."""
    logprobs: tuple[tuple[float, ...], ...] = ()
    """Of all tokens of each completion under the weights of the call, where they were asked for."""


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
