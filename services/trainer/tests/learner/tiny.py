"""A model and batches that are small enough for any test."""

import hashlib
from pathlib import Path

from reflux_model.config import ModelConfig
from reflux_model.creation import create_folder
from reflux_model.parameters import initial_parameters
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec

CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    max_positions=48,
    eos_token_id=1,
    pad_token_id=0,
)


def tiny_learner(seed: int = 0) -> Learner:
    return Learner(CONFIG, initial_parameters(CONFIG, seed, std=0.2), seed)


def tiny_folder(folder: Path, seed: int = 0) -> Path:
    create_folder(folder, CONFIG, seed)
    return folder


def tiny_groups(count: int = 4, members: int = 3) -> list[GroupData]:
    """Groups with completions of different lengths, advantages and masks; log-probs as of an older policy."""
    groups = []
    for group in range(count):
        completions = []
        for member in range(members):
            length = 1 + (group + 2 * member) % 5
            tokens = [2 + (7 * group + 5 * member + 3 * place) % 27 for place in range(length)]
            completions.append(
                CompletionData(
                    token_ids=tokens,
                    sampler_logprobs=[-3.3 + 0.02 * place for place in range(length)],
                    advantage=(-1.0) ** member * (1 + group) / 2,
                    mask=[True] * (length - 1) + [member != 1],
                )
            )
        groups.append(GroupData([3 + (group + place) % 20 for place in range(4 + group)], completions))
    return groups


LOSS = LossSpec(name="ppo", clip_low=5.0, clip_high=5.0)


def train(learner: Learner, steps: int) -> None:
    for _ in range(steps):
        learner.forward_backward(tiny_groups(), LOSS)
        learner.optim_step(StepSpec(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0))


def digest(learner: Learner) -> str:
    mean, square = learner.optimizer.begin(learner.flat)
    parts = [tensor.numpy().tobytes() for tensor in (learner.flat, mean, square)]
    return hashlib.sha256(b"".join([*parts, str(learner.optimizer.steps).encode()])).hexdigest()
