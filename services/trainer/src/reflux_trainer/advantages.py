"""Turns graded groups into the learner's batch: advantages per group, unknown rewards left out."""

from collections.abc import Sequence

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_runs.config import RlConfig
from reflux_trainer.algo.overlong import overlong_penalty
from reflux_trainer.algo.registry import ADVANTAGES
from reflux_trainer.algo.reinforce_pp import reinforce_pp_advantages
from reflux_trainer.algo.rewards import Rewards
from reflux_trainer.backlog import rewards_of
from reflux_trainer.queue.records import Group


def shaped(group: Group, rewards: Rewards, config: RlConfig) -> Rewards:
    """Rewards [samples] of a group's answers less the penalty of those that are nearly too long; NaN stays unknown."""
    if not config.overlong_buffer:
        return rewards
    lengths = np.array([len(sample.token_ids) for sample in group.samples], np.int64)
    return rewards + overlong_penalty(
        lengths, max_length=config.max_tokens, buffer=config.overlong_buffer, factor=config.overlong_penalty
    )


def advantages_of(groups: Sequence[Group], config: RlConfig) -> list[np.ndarray]:
    """Advantages [samples] of each group of a step, from its shaped rewards; 0 where the reward is unknown."""
    rewards = [shaped(group, rewards_of(group), config) for group in groups]
    if config.algorithm == "reinforce_pp":
        return _over_the_step(groups, rewards)
    return [ADVANTAGES[config.algorithm](rewards_G) for rewards_G in rewards]


def _over_the_step(groups: Sequence[Group], rewards: Sequence[Rewards]) -> list[np.ndarray]:
    """REINFORCE++ with rewards at the last token and no discount: all tokens of an answer have one advantage."""
    advantages = [np.zeros(rewards_G.shape) for rewards_G in rewards]
    chosen = [
        (row, place, len(sample.token_ids))
        for row, group in enumerate(groups)
        for place, sample in enumerate(group.samples)
        if sample.token_ids and not np.isnan(rewards[row][place])
    ]
    per_token = [np.append(np.zeros(tokens - 1), rewards[row][place]) for row, place, tokens in chosen]
    for (row, place, _), values in zip(chosen, reinforce_pp_advantages(per_token), strict=True):
        advantages[row][place] = values[0]
    return advantages


def loss_config(config: RlConfig) -> pb.LossConfig:
    """Loss and aggregation of a run.

    GSPO is a mean over answers of a mean over their tokens (arXiv 2507.18071), Dr. GRPO divides by a constant length
    (arXiv 2503.20783), everything else by the number of the batch's tokens (DAPO, arXiv 2503.14476).
    """
    loss = pb.LossConfig(name=config.loss, clip_low=config.clip_low, clip_high=config.clip_high, tis_cap=config.tis_cap)
    if config.kl_coefficient:
        loss.kl_coefficient, loss.kl_estimator, loss.own_reference = config.kl_coefficient, config.kl_estimator, True
    if config.loss in ("gspo", "gspo_token"):
        loss.aggregation = "sequence_mean"
    elif config.algorithm == "dr_grpo":
        loss.aggregation, loss.constant_length = "constant", config.max_tokens
    else:
        loss.aggregation = "token_mean"
    return loss


def training_batch(
    op_id: int, model_id: str, groups: Sequence[Group], config: RlConfig
) -> tuple[pb.ForwardBackwardRequest, list[np.ndarray]]:
    """The request of one step and the advantages of each group."""
    advantages = advantages_of(groups, config)
    request = pb.ForwardBackwardRequest(
        op_id=op_id,
        model_id=model_id,
        groups=[
            prompt_group(group, values, [grade.known for grade in group.grades])
            for group, values in zip(groups, advantages, strict=True)
        ],
        loss=loss_config(config),
    )
    return request, advantages


def prompt_group(group: Group, advantages: np.ndarray, counted: Sequence[bool]) -> pb.PromptGroup:
    """A prompt with those of its answers that are `counted` and not empty."""
    completions = [
        pb.Completion(token_ids=sample.token_ids, behaviour_logprobs=sample.logprobs, advantage=float(advantage))
        for sample, counts, advantage in zip(group.samples, counted, advantages, strict=True)
        if counts and sample.token_ids
    ]
    return pb.PromptGroup(prompt_token_ids=group.token_ids, completions=completions)
