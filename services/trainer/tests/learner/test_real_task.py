"""The real XRD task through learner and sampler: warm-up learns, and both see the same log-probs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from reflux_model.config import ModelConfig
from reflux_model.creation import EmbeddingRows
from reflux_model.generation import generate
from reflux_model.parameters import initial_parameters
from reflux_model.sampling import SamplingParams
from reflux_tasks.registry import create_task
from reflux_tasks.task import Task
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def task(request: pytest.FixtureRequest) -> Task:
    assert request.config.cache is not None
    cache_dir = Path(request.config.cache.mkdir("reflux-xrd-phases"))  # shared with the tests of the task itself
    return create_task("xrd-phase-id", 0, cache_dir)


def _learner(task: Task) -> Learner:
    config = ModelConfig(
        vocab_size=len(task.words),
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_size=16,
        max_positions=96,
    )
    first, values = task.initial_embedding(64, 0)  # type: ignore[misc]
    rows = EmbeddingRows(first, values.astype(np.float32))
    return Learner(config, initial_parameters(config, 0, rows=rows), 0)


def _supervised(task: Task, first: int, count: int) -> list[GroupData]:
    problems = [task.problem("warmup", index) for index in range(first, first + count)]
    return [GroupData(task.prompt_ids(problem), [CompletionData(task.answer_ids(problem))]) for problem in problems]


def test_warm_up_learns_on_the_real_task(task: Task) -> None:
    learner = _learner(task)
    losses = []
    for step in range(12):
        figures = learner.forward_backward(_supervised(task, 32 * step, 32), LossSpec(name="cross_entropy"))
        assert learner.optim_step(StepSpec(learning_rate=3e-3, beta2=0.98, max_grad_norm=1.0)).applied
        losses.append(figures.loss)
    assert losses[0] == pytest.approx(np.log(len(task.words)), abs=0.2)
    assert losses[-1] < losses[0] - 1.5


def test_sampler_and_learner_agree_on_log_probs(task: Task) -> None:
    learner = _learner(task)
    for step in range(3):
        learner.forward_backward(_supervised(task, 16 * step, 16), LossSpec(name="cross_entropy"))
        learner.optim_step(StepSpec(learning_rate=3e-3))
    prompts = [task.prompt_ids(task.problem("train", index)) for index in range(6)]
    sampled = generate(
        learner.params,
        learner.config,
        prompts,
        SamplingParams.uniform(list(range(24))),
        group_size=4,
        max_new_tokens=task.max_answer_words,
        end_token=task.ids[task.end_word],
    )
    groups = [
        GroupData(prompt, [CompletionData(each.tokens, each.logprobs) for each in sampled[4 * row : 4 * row + 4]])
        for row, prompt in enumerate(prompts)
    ]
    figures = learner.forward_backward(groups, LossSpec(name="ppo"))
    assert figures.tokens == sum(len(each.tokens) for each in sampled)
    assert figures.max_logprob_gap < 1e-4
