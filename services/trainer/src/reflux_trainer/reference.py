"""The reference's log-probs for a KL in the reward: asked for before a step is decided, and logged with it."""

from collections.abc import Sequence

import numpy as np

from reflux.trainer.v1 import learner_service_pb2 as pb
from reflux_trainer.advantages import TokenRows, in_reward, known_of, prompt_group
from reflux_trainer.parts import Parts
from reflux_trainer.queue.records import Group


async def reference_logprobs(parts: Parts, groups: Sequence[Group]) -> TokenRows | None:
    """lp_ref of every token of the answers that a step trains on; None for a run without a KL in the reward."""
    if not in_reward(parts.config.rl):
        return None
    return rows_of(groups, await parts.learner.reference_logprobs(asked_of(groups)))


def asked_of(groups: Sequence[Group]) -> list[pb.PromptGroup]:
    """The answers that count, to ask the learner about."""
    return [prompt_group(group, np.zeros(len(group.samples)), known_of(group)) for group in groups]


def rows_of(groups: Sequence[Group], answered: Sequence[pb.PromptGroup]) -> TokenRows:
    """What the learner answered per token, in the place of log-probs, by group and answer."""
    rows = iter([completion.behaviour_logprobs for group in answered for completion in group.completions])
    return [
        [
            np.array(next(rows)) if sample.token_ids and known else np.zeros(0)
            for sample, known in zip(group.samples, known_of(group), strict=True)
        ]
        for group in groups
    ]
