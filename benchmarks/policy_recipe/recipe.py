"""The recipe as one process: warm-up, then GRPO with filtered and refilled groups, with a fixed lag."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reflux_model.config import ModelConfig
from reflux_model.creation import EmbeddingRows
from reflux_model.generation import generate
from reflux_model.parameters import Parameters, initial_parameters
from reflux_model.sampling import SamplingParams, seeds_tensor
from reflux_tasks.task import Problem, Task
from reflux_trainer.algo.registry import ADVANTAGES
from reflux_trainer.algo.rewards import has_signal
from reflux_trainer.learner.core import Learner
from reflux_trainer.learner.ops import CompletionData, GroupData, LossSpec, StepSpec


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numbers of the recipe; learning rates are peaks."""

    seed: int = 0
    warmup_steps: int = 200
    warmup_batch: int = 64
    warmup_lr: float = 2e-3
    steps: int = 150
    groups: int = 32
    samples: int = 8
    lr: float = 2e-4
    ramp_steps: int = 15
    final_lr_share: float = 0.2
    lag: int = 0
    """Versions between the weights that sampled a batch and those that it updates."""
    algorithm: str = "grpo"
    loss: str = "ppo"
    clip_high: float = 0.2
    tis_cap: float = 0.0
    refill: bool = True
    """Drop groups without signal and sample others until the batch is full."""
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 336


@dataclass
class Clock:
    """CPU seconds per part of the work: a busy machine distorts them less than wall time."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.process_time)

    def start(self) -> None:
        """Forgets the time since the last lap."""
        self._last = time.process_time()

    def lap(self, part: str) -> None:
        """Books the time since the last lap or start."""
        now = time.process_time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class Run:
    """One run of the recipe on a task."""

    def __init__(self, recipe: Recipe, task: Task[Any]) -> None:
        self.recipe, self.task = recipe, task
        self.config = ModelConfig(
            vocab_size=len(task.words),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_layers=recipe.num_layers,
            num_heads=recipe.num_heads,
            num_kv_heads=recipe.num_heads,
            head_size=recipe.hidden_size // recipe.num_heads,
            max_positions=96,
            eos_token_id=task.ids[task.end_word],
        )
        embedding = task.initial_embedding(recipe.hidden_size, recipe.seed)
        rows = EmbeddingRows(embedding[0], embedding[1].astype(np.float32)) if embedding else None
        self.learner = Learner(self.config, initial_parameters(self.config, recipe.seed, rows=rows), recipe.seed)
        self.clock = Clock()
        self.next_prompt = 0
        self.filtered = 0

    def warm_up(self) -> Iterator[tuple[int, float]]:
        """Supervised steps on clean patterns; yields (step, loss)."""
        recipe = self.recipe
        for step in range(recipe.warmup_steps):
            self.clock.start()
            first = step * recipe.warmup_batch
            problems = [self.task.problem("warmup", first + offset) for offset in range(recipe.warmup_batch)]
            groups = [
                GroupData(self.task.prompt_ids(problem), [CompletionData(self.task.answer_ids(problem))])
                for problem in problems
            ]
            self.clock.lap("warmup_data")
            figures = self.learner.forward_backward(groups, LossSpec(name="cross_entropy"))
            decay = max(0.05, 1 - step / recipe.warmup_steps)
            rate = recipe.warmup_lr * min(1.0, (step + 1) / 20) * decay
            self.learner.optim_step(StepSpec(learning_rate=rate, beta2=0.98, weight_decay=0.01, max_grad_norm=1.0))
            self.clock.lap("warmup_train")
            yield step, figures.loss

    def reinforce(self) -> Iterator[tuple[int, dict[str, float]]]:
        """GRPO steps; yields (step, figures)."""
        recipe = self.recipe
        waiting: deque[tuple[list[GroupData], dict[str, float]]] = deque()
        for step in range(recipe.steps):
            while len(waiting) <= recipe.lag:
                waiting.append(self._batch())
            groups, figures = waiting.popleft()
            self.clock.start()
            loss = LossSpec(
                name=recipe.loss,  # type: ignore[arg-type]
                clip_high=recipe.clip_high,
                tis_cap=recipe.tis_cap,
            )
            batch = self.learner.forward_backward(groups, loss)
            decay = max(recipe.final_lr_share, 1 - step / recipe.steps)
            rate = recipe.lr * min(1.0, (step + 1) / recipe.ramp_steps) * decay
            done = self.learner.optim_step(
                StepSpec(learning_rate=rate, beta2=0.99, max_grad_norm=1.0, reset_optimizer=step == 0)
            )
            self.clock.lap("train")
            yield (
                step,
                figures
                | {
                    "entropy": batch.entropy,
                    "gap": batch.max_logprob_gap,
                    "clip": batch.clip_fraction,
                    "grad_norm": done.grad_norm,
                    "tokens": batch.tokens,
                },
            )

    def _batch(self) -> tuple[list[GroupData], dict[str, float]]:
        recipe = self.recipe
        kept: list[GroupData] = []
        rewards: list[float] = []
        seen = 0
        while len(kept) < recipe.groups:
            if seen > 30 * recipe.groups:
                raise RuntimeError(f"only {len(kept)} of {seen} groups have a signal; warm up longer")
            missing = recipe.groups - len(kept)
            sampled = self._sample_groups(recipe.groups if not kept else max(4, missing))
            for group, group_rewards in sampled:
                seen += 1
                rewards += group_rewards.tolist()
                if len(kept) < recipe.groups and (has_signal(group_rewards) or not recipe.refill):
                    kept.append(group)
        self.filtered += seen - len(kept)
        return kept, {"reward": float(np.mean(rewards)), "live": len(kept) / seen}

    def _sample_groups(self, count: int) -> list[tuple[GroupData, np.ndarray]]:
        recipe = self.recipe
        self.clock.start()
        indices = range(self.next_prompt, self.next_prompt + count)
        self.next_prompt += count
        problems = [self.task.problem("train", index) for index in indices]
        prompts = [self.task.prompt_ids(problem) for problem in problems]
        self.clock.lap("data")
        answers = self.answers(self.learner.params, prompts, recipe.samples, 1.0, recipe.seed * 1_000_003 + 17)
        self.clock.lap("generate")
        graded = []
        for problem, prompt, members in zip(problems, prompts, answers, strict=True):
            rewards = np.array(self.rewards(problem, [tokens for tokens, _ in members]))
            advantages = ADVANTAGES[recipe.algorithm](rewards)  # type: ignore[index]
            completions = [
                CompletionData(tokens, logprobs, float(advantage))
                for (tokens, logprobs), advantage in zip(members, advantages, strict=True)
            ]
            graded.append((GroupData(prompt, completions), rewards))
        self.clock.lap("verify")
        return graded

    def answers(
        self, params: Parameters, prompts: list[list[int]], samples: int, temperature: float, seed: int
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Samples per prompt as (token ids, log-probs)."""
        seeds = [hash((seed, self.next_prompt, row)) for row in range(len(prompts) * samples)]
        completions = generate(
            params,
            self.config,
            prompts,
            SamplingParams.uniform(seeds_tensor(seeds), temperature=temperature),
            group_size=samples,
            max_new_tokens=self.task.max_answer_words,
            end_token=self.task.ids[self.task.end_word],
        )
        pairs = [(completion.tokens, completion.logprobs) for completion in completions]
        return [pairs[start : start + samples] for start in range(0, len(pairs), samples)]

    def rewards(self, problem: Problem, answers: list[list[int]]) -> list[float]:
        """Label rewards of some answers to one problem."""
        words = [[self.task.words[token] for token in tokens] for tokens in answers]
        grades = self.task.verifiers["label"].grade(self.task.truth(problem), words)
        return [grade.reward for grade in grades]
