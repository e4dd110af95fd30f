"""A run without services, queues or asynchrony: ask, grade, train, one after the other, in one thread.

What a run with `deterministic = true` and `max_lag = 0` must equal to the last bit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reflux_inference_gateway.engine.core import EngineCore
from reflux_inference_gateway.engine.served import CoreOptions, Weights
from reflux_inference_gateway.engine.types import FinishedSample, GroupRequest, Sampling, TokenDelta
from reflux_model.replay import PREFILL_TOKENS
from reflux_runs.config import RunConfig
from reflux_tasks.task import Task
from reflux_trainer.advantages import training_batch
from reflux_trainer.backlog import closing_of
from reflux_trainer.codec import Codec
from reflux_trainer.folder import prepare
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.numerics import Numerics
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec
from reflux_trainer.learner.parsing import parse_groups, parse_loss
from reflux_trainer.problems import open_task, question, sampling_seed
from reflux_trainer.queue.records import Grade, Group, Sample, Span
from reflux_trainer.schedule import rl_rate, warmup_rate


class SynchronousRun:
    """One run; `curve` yields (loss, gradient norm, entropy) of each step of reinforcement learning."""

    def __init__(self, config: RunConfig, folder: Path, cache: Path) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.task: Task[Any] = open_task(config, cache)
        model = prepare(config, folder, self.task)
        self.codec = Codec.of_run(config, model)
        self.learner = Learner.from_folder(model, config.seed, Numerics(deterministic=True))

    def curve(self) -> Iterator[tuple[float, float, float]]:
        rl, index = self.config.rl, 0
        for step in range(self.config.warmup.steps):
            self._warm_up(step)
        for step in range(rl.steps):
            groups: list[Group] = []
            while len(groups) < rl.groups_per_step:
                group = self._group(index)
                groups += [group] if closing_of(group) is None else []
                index += 1
            request, _ = training_batch(1, "", groups, rl)
            batch = parse_groups(list(request.groups), self.learner.config)
            figures = self.learner.forward_backward(batch, parse_loss(request.loss))
            rate, betas = rl_rate(rl, step), {"beta1": 0.9, "beta2": 0.99, "max_grad_norm": rl.max_grad_norm}
            done = self.learner.optim_step(StepSpec(learning_rate=rate, **betas, reset_optimizer=step == 0))
            yield figures.loss, done.grad_norm, figures.entropy

    def _warm_up(self, step: int) -> None:
        stage = self.config.warmup
        first = step * stage.batch_size
        asked = [question(self.task, "warmup", each) for each in range(first, first + stage.batch_size)]
        batch = [
            GroupData(self.codec.prompt_ids(each), [CompletionData(self.codec.answer_ids(each), advantage=1.0)])
            for each in asked
        ]
        self.learner.forward_backward(batch, LossSpec(name="cross_entropy", aggregation="token_mean"))
        spec = StepSpec(learning_rate=warmup_rate(stage, step), beta2=0.98, weight_decay=0.01, max_grad_norm=1.0)
        self.learner.optim_step(spec)

    def _group(self, index: int) -> Group:
        asked, version = question(self.task, "train", index), self.learner.version
        prompt = self.codec.prompt_ids(asked)
        samples = [
            Sample(list(each.token_ids), list(each.logprobs), "stop", [Span(version, 0, len(each.token_ids))])
            for each in self._answers(index, prompt)
        ]
        answers = [self.codec.answer_text(sample.token_ids) for sample in samples]
        found = self.task.verifiers[self.config.rl.verifier].grade(asked.truth, answers)
        grades = [Grade(grade.outcome, grade.reward) for grade in found]
        return Group(index, version, prompt, samples, grades, 0.0, 0.0, 0.0, 0.0, 0.0, "")

    def _answers(self, index: int, prompt: list[int]) -> list[FinishedSample]:
        rl, config, finished = self.config.rl, self.learner.config, dict[int, FinishedSample]()

        def deliver(_request: str, event: FinishedSample | TokenDelta) -> None:
            if isinstance(event, FinishedSample):
                finished[event.index] = event

        length = config.max_positions
        bounds = {"max_rows": 1, "max_model_len": length, "kv_tokens": length, "prefix_blocks": 0}
        options = CoreOptions(**bounds, prefill_tokens_per_step=PREFILL_TOKENS, kv_after_swap="refresh")
        engine = EngineCore(config, Weights(self.learner.params, 0, 0), options, deliver, eos_ids=[self.codec.end_id])
        seed = sampling_seed(self.config.seed, index)
        sampling = Sampling(max_tokens=rl.max_tokens, temperature=rl.temperature, seed=seed)
        group = {"prompt_ids": tuple(prompt), "num_samples": rl.samples_per_group, "sampling": sampling}
        engine.submit(GroupRequest(request_id="", **group))
        while engine.step():
            pass
        return [finished[number] for number in range(rl.samples_per_group)]
