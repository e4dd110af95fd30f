"""Runs a loop of tinker-cookbook against a Tinker API, in the cookbook's own environment.

    TINKER_API_KEY=tml-... python cookbook_loop.py URL LOG_FOLDER sync|async|supervised BASE_MODEL TOKENIZER_ID

The toy tasks need no data: the reward is the share of one token, the text to learn is one sequence. The last line of
output is one JSON object with what the loop logged about its steps.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

WANTED_TOKEN = 7
ITERATIONS, GROUPS, MEMBERS = 12, 4, 8
SEQUENCE = [1, 9, 4, 9, 4, 9, 4, 9]


class Numbers:
    """A tokenizer of numbers."""

    name_or_path = "numbers"

    def encode(self, *_args: Any, **_options: Any) -> list[int]:
        """Always the same token."""
        return [1]

    def decode(self, ids: Any, *_args: Any, **_options: Any) -> str:
        """The ids themselves."""
        return " ".join(map(str, ids))


class Sevens(Env):
    """One turn; the reward is the share of the wanted token."""

    async def initial_observation(self) -> Any:
        return tinker.ModelInput.from_ints([1, 2, 3]), []

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        tokens = list(action)
        return StepResult(
            reward=tokens.count(WANTED_TOKEN) / max(len(tokens), 1),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={},
        )


class SevensGroup(EnvGroupBuilder):
    """The members of one group."""

    async def make_envs(self) -> list[Env]:
        return [Sevens() for _ in range(MEMBERS)]

    async def compute_group_rewards(self, trajectories: Any, envs: Any) -> Any:
        return [(0.0, {}) for _ in trajectories]

    def logging_tags(self) -> list[str]:
        return ["sevens"]


class Batches(RLDataset, SupervisedDataset):
    """Equal batches, of groups or of datums."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def get_batch(self, index: int) -> Any:
        return self._batch()

    def __len__(self) -> int:
        return ITERATIONS


@chz.chz
class RlTask(RLDatasetBuilder):
    """Groups for the RL loop."""

    async def __call__(self) -> Any:
        return Batches(lambda: [SevensGroup() for _ in range(GROUPS)]), None


@chz.chz
class SupervisedTask(SupervisedDatasetBuilder):
    """One sequence for the supervised loop."""

    def __call__(self) -> Any:
        inputs = {"target_tokens": SEQUENCE[1:], "weights": [1.0] * (len(SEQUENCE) - 1)}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(SEQUENCE[:-1]), loss_fn_inputs=inputs)
        return Batches(lambda: [datum] * 4), None


def main() -> None:
    """Runs the loop and prints its steps."""
    url, folder, mode, base, tokenizer = sys.argv[1:]
    for name in (base, tokenizer):
        tokenizer_utils.register_tokenizer(name, Numbers)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {
        "model_name": base, "recipe_name": "toy", "log_path": folder, "lora_rank": 8, "base_url": url, "eval_every": 0,
        "save_every": 5, "learning_rate": 0.05,
    }  # fmt: skip
    if mode == "supervised":
        config = supervised.Config(dataset_builder=SupervisedTask(), **options)
        asyncio.run(supervised.main(config))
    else:
        options |= {"loss_fn": "importance_sampling", "max_tokens": 6, "rollout_error_tolerance": False}
        if mode == "async":
            options["async_config"] = rl.AsyncConfig(
                max_steps_off_policy=2, groups_per_batch=GROUPS, loss_fn="importance_sampling"
            )
        asyncio.run(rl.main(rl.Config(dataset_builder=RlTask(), **options)))
    steps = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
