"""Turns graded groups into the learner's batch: advantages per group, unknown rewards left out."""

from collections.abc import Sequence

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_runs.config import RlConfig
from reflux_trainer.algo.gae import gae_advantages
from reflux_trainer.algo.kl import penalised_rewards
from reflux_trainer.algo.overlong import overlong_penalty
from reflux_trainer.algo.registry import ADVANTAGES
from reflux_trainer.algo.reinforce_pp import reinforce_pp_advantages, whiten
from reflux_trainer.algo.rewards import Rewards
from reflux_trainer.backlog import rewards_of
from reflux_trainer.queue.records import Group

TokenRows = Sequence[Sequence[np.ndarray]]
"""Of each group of a step, of each of its answers: a number per token, none for an answer that does not count."""


def shaped(group: Group, rewards: Rewards, config: RlConfig) -> Rewards:
    """Rewards [samples] of a group's answers less the penalty of those that are nearly too long; NaN stays unknown."""
    if not config.overlong_buffer:
        return rewards
    lengths = np.array([len(sample.token_ids) for sample in group.samples], np.int64)
    return rewards + overlong_penalty(
        lengths, max_length=config.max_tokens, buffer=config.overlong_buffer, factor=config.overlong_penalty
    )


def advantages_of(
    groups: Sequence[Group], config: RlConfig, reference: TokenRows | None = None, values: TokenRows | None = None
) -> list[np.ndarray]:
    """Advantages [samples] of each group of a step, from its shaped rewards; 0 where the reward is unknown.

    With the KL in the reward, answers are compared by R - beta * sum of k1 (arXiv 2402.14740). REINFORCE++ then, and
    GAE always, has another advantage at every token of an answer: here are those of the first tokens.
    """
    rows = token_rewards(groups, config, reference)
    if config.algorithm == "gae":
        assert values is not None
        return _first(critic_rows(rows, values, config)[0])
    if config.algorithm == "reinforce_pp":
        return _first(over_the_step(rows))
    rewards = [shaped(group, rewards_of(group), config) for group in groups]
    if in_reward(config):
        rewards = [
            np.array([row.sum() if row.size else reward for row, reward in zip(group, rewards_G, strict=True)])
            for group, rewards_G in zip(rows, rewards, strict=True)
        ]
    return [ADVANTAGES[config.algorithm](rewards_G) for rewards_G in rewards]


def _first(rows: TokenRows) -> list[np.ndarray]:
    return [np.array([row[0] if row.size else 0.0 for row in group]) for group in rows]


def critic_rows(rewards: TokenRows, values: TokenRows, config: RlConfig) -> tuple[TokenRows, TokenRows]:
    """GAE per token of each answer, whitened over the step, and the returns that the critic is to tell: A + V."""
    raw = [
        [
            gae_advantages(rewards_L, values_L, gamma=config.gamma, lam=config.gae_lambda)
            for rewards_L, values_L in zip(*pair, strict=True)
        ]
        for pair in zip(rewards, values, strict=True)
    ]
    returns = [
        [raw_L + values_L for raw_L, values_L in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)
    ]
    flat = np.concatenate([np.zeros(0), *(raw_L for group in raw for raw_L in group)])
    whitened = iter(whiten(flat, np.ones(flat.size, bool)))
    return [[np.fromiter(whitened, float, raw_L.size) for raw_L in group] for group in raw], returns


def over_the_step(rewards: TokenRows) -> list[list[np.ndarray]]:
    """REINFORCE++ without a discount: advantages per token of each answer, from its rewards per token."""
    whitened = iter(reinforce_pp_advantages([row for group in rewards for row in group if row.size]))
    return [[next(whitened) if row.size else row for row in group] for group in rewards]


def token_rewards(groups: Sequence[Group], config: RlConfig, reference: TokenRows | None) -> list[list[np.ndarray]]:
    """Rewards per token: an answer's shaped one at its last token, and with the KL in the reward -beta * k1 at every
    token. Empty for answers without tokens or without a known reward.
    """
    found = []
    for number, group in enumerate(groups):
        rows = [np.zeros(0)] * len(group.samples)
        for place, reward in enumerate(shaped(group, rewards_of(group), config)):
            sample = group.samples[place]
            if sample.token_ids and not np.isnan(reward):
                logprobs_L = np.array(sample.logprobs)
                beta, lp_ref_L = 0.0, logprobs_L
                if reference is not None and in_reward(config):
                    beta, lp_ref_L = config.kl_coefficient, reference[number][place]
                rows[place] = penalised_rewards(reward, logprobs_L, lp_ref_L, beta, "k1")
        found.append(rows)
    return found


def in_reward(config: RlConfig) -> bool:
    """Whether the run has a KL that counts in the reward."""
    return config.kl_coefficient > 0 and config.kl_in == "reward"


def loss_config(config: RlConfig) -> pb.LossConfig:
    """Loss and aggregation of a run.

    GSPO is a mean over answers of a mean over their tokens (arXiv 2507.18071), Dr. GRPO divides by a constant length
    (arXiv 2503.20783), everything else by the number of the batch's tokens (DAPO, arXiv 2503.14476).
    """
    loss = pb.LossConfig(name=config.loss, clip_low=config.clip_low, clip_high=config.clip_high, tis_cap=config.tis_cap)
    if config.kl_coefficient:
        # In the reward too the learner keeps the reference, and says how far the policy is from it.
        loss.own_reference, loss.kl_estimator = True, config.kl_estimator
        loss.kl_coefficient = 0.0 if in_reward(config) else config.kl_coefficient
    if config.algorithm == "gae":
        loss.value_coefficient, loss.value_clip = config.value_coefficient, config.value_clip
    if config.loss in ("gspo", "gspo_token"):
        loss.aggregation = "sequence_mean"
    elif config.algorithm == "dr_grpo":
        loss.aggregation, loss.constant_length = "constant", config.max_tokens
    else:
        loss.aggregation = "token_mean"
    return loss


def training_batch(
    op_id: int,
    model_id: str,
    groups: Sequence[Group],
    config: RlConfig,
    reference: TokenRows | None = None,
    values: TokenRows | None = None,
) -> tuple[pb.ForwardBackwardRequest, list[np.ndarray]]:
    """The request of one step and the advantages of each group; `reference` is lp_ref of every token, for a KL in the
    reward, `values` the critic's V before every token."""
    advantages = advantages_of(groups, config, reference, values)
    request = pb.ForwardBackwardRequest(
        op_id=op_id,
        model_id=model_id,
        groups=[prompt_group(group, values, known_of(group)) for group, values in zip(groups, advantages, strict=True)],
        loss=loss_config(config),
    )
    if reference is not None:
        for completion, row in zip(_completions(request), _filled(reference), strict=True):
            completion.reference_logprobs[:] = row
    if config.algorithm == "reinforce_pp" and in_reward(config):
        for completion, row in zip(
            _completions(request), _filled(over_the_step(token_rewards(groups, config, reference))), strict=True
        ):
            completion.advantages[:] = row
    if config.algorithm == "gae" and values is not None:
        per_token, returns = critic_rows(token_rewards(groups, config, reference), values, config)
        rows = zip(_filled(per_token), _filled(returns), _filled(values), strict=True)
        for completion, (advantages_L, returns_L, values_L) in zip(_completions(request), rows, strict=True):
            completion.advantages[:], completion.returns[:] = advantages_L, returns_L
            completion.values[:] = values_L
    return request, advantages


def known_of(group: Group) -> list[bool]:
    """Whose reward is known."""
    return [grade.known for grade in group.grades]


def _completions(request: pb.ForwardBackwardRequest) -> list[pb.Completion]:
    return [completion for group in request.groups for completion in group.completions]


def _filled(rows: TokenRows) -> list[np.ndarray]:
    return [row for group in rows for row in group if row.size]


def prompt_group(group: Group, advantages: np.ndarray, counted: Sequence[bool]) -> pb.PromptGroup:
    """A prompt with those of its answers that are `counted` and not empty."""
    completions = [
        pb.Completion(token_ids=sample.token_ids, behaviour_logprobs=sample.logprobs, advantage=float(advantage))
        for sample, counts, advantage in zip(group.samples, counted, advantages, strict=True)
        if counts and sample.token_ids
    ]
    return pb.PromptGroup(prompt_token_ids=group.token_ids, completions=completions)
