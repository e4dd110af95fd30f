"""What correction samples are worth when the quick reward is biased and the true one is late.

    python benchmarks/rl/late_rewards.py [--plot docs/images/late-rewards.svg]

A toy with the loop's own advantages, importance weights and correction policy (`reflux_trainer.algo`, `.late`). A
softmax policy answers prompts with a few tokens. The full reward is the share of right tokens; its verifier sleeps
(log-normal, median 0.15 s). The surrogate answers at once and is biased: on half of the prompts it likes a wrong token
better than the right one. Rank correlation over random answers stays positive, so that calibration would trust it.

Three runs with equal prompts, draws, steps and learning rate, each with a window of two batches in flight:

- `full`: a group is trained when its full rewards are there.
- `corrected`: a group is trained on the surrogate at once; when its full rewards come, the correction sample joins the
  next step. The run ends when the last correction is trained.
- `surrogate`: a group is trained on the surrogate, and nothing follows.

Figures: `late_final_gap` = full reward of the greedy policy after `full` minus that after `corrected`;
`late_wall_ratio` = wall time of `corrected` over that of `full`; `late_uncorrected_gap` = the gap without corrections.
Means over three seeds. Sleeps are real: this is wall time. The last line is JSON.
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from reflux_trainer.algo.grpo import grpo_advantages
from reflux_trainer.late.correction import CorrectionPolicy, Provisional, correct, correction_weights, scaled

PROMPTS, LENGTH, WORDS, GROUP, GROUPS = 8, 3, 6, 8, 8
STEPS, RATE = 160, 0.6
FULL_MEDIAN_SECONDS, FULL_SIGMA, SURROGATE_SECONDS = 0.15, 0.6, 0.003
LIKED = 1.3
"""Surrogate reward of the wrong token that it likes; the right one has 1."""
POLICY = CorrectionPolicy(algorithm="grpo", max_lag=64, cap=2.0)
Mode = Literal["full", "corrected", "surrogate"]


@dataclass
class Sampled:
    """One group: its answers [group, length], what the sampler thought of them, and when it was drawn."""

    number: int
    prompt: int
    answers: np.ndarray
    logprobs: np.ndarray
    version: int
    trained: np.ndarray = field(default_factory=lambda: np.zeros(GROUP))


class Toy:
    """Policy logits [prompts, length, words], and the two rewards."""

    def __init__(self, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self.seed = seed
        self.logits = np.zeros((PROMPTS, LENGTH, WORDS))
        self.right = dice.integers(WORDS, size=(PROMPTS, LENGTH))
        self.liked = (self.right + dice.integers(1, WORDS, size=self.right.shape)) % WORDS
        self.biased = np.arange(PROMPTS) % 2 == 0
        self.version = 0
        self.dropped = 0
        """Corrections that came too late."""

    def logprobs(self, prompt: int) -> np.ndarray:
        """Of every word at every place [length, words]."""
        shifted = self.logits[prompt] - self.logits[prompt].max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    def sample(self, number: int) -> Sampled:
        """A group; its draws depend on seed and number alone."""
        dice = np.random.default_rng((self.seed, number))
        prompt = number % PROMPTS
        table = self.logprobs(prompt)
        noise = dice.gumbel(size=(GROUP, LENGTH, WORDS))
        answers = (table[None] + noise).argmax(axis=-1)
        return Sampled(number, prompt, answers, table[np.arange(LENGTH), answers], self.version)

    def full(self, group: Sampled) -> np.ndarray:
        """Share of right tokens [group]."""
        return (group.answers == self.right[group.prompt]).mean(axis=-1)

    def surrogate(self, group: Sampled) -> np.ndarray:
        """The same, and more for the wrong token that it likes on half of the prompts."""
        liked = (group.answers == self.liked[group.prompt]).mean(axis=-1)
        return self.full(group) + LIKED * liked * self.biased[group.prompt]

    def step(self, batch: list[tuple[Sampled, np.ndarray]], late: list[tuple[Sampled, np.ndarray]]) -> None:
        """One step on a batch of (group, advantages), with the correction samples that have come."""
        tokens = max(1, len(batch)) * GROUP * LENGTH
        joined = scaled([change for _, change in late], len(late) * GROUP * LENGTH, tokens)
        gradient = np.zeros_like(self.logits)
        for rows, count in ((batch, tokens), ([(g, c) for (g, _), c in zip(late, joined, strict=True)], None)):
            for group, advantages in rows:
                gradient[group.prompt] += self._gradient(group, advantages) / (count or len(late) * GROUP * LENGTH)
        self.logits += RATE * PROMPTS * gradient
        self.version += 1

    def _gradient(self, group: Sampled, advantages: np.ndarray) -> np.ndarray:
        table = self.logprobs(group.prompt)
        present = table[np.arange(LENGTH), group.answers]
        weights = np.stack(
            [correction_weights(now, then, POLICY) for now, then in zip(present, group.logprobs, strict=True)]
        )
        pulls = np.eye(WORDS)[group.answers] - np.exp(table)[None]
        return ((weights * advantages[:, None])[..., None] * pulls).sum(axis=0)

    def reward(self) -> float:
        """Full reward of the greedy policy over all prompts."""
        return float((self.logits.argmax(axis=-1) == self.right).mean())


async def run(mode: Mode, seed: int, curve: list[tuple[float, float]]) -> tuple[float, float]:
    """Final reward and wall seconds; `curve` gets (seconds, reward) of every step."""
    toy, started = Toy(seed), time.monotonic()
    ready: asyncio.Queue[Sampled] = asyncio.Queue()
    settled: asyncio.Queue[Sampled] = asyncio.Queue()
    tasks: set[asyncio.Task[None]] = set()
    open_verifications = 0

    async def verify(group: Sampled) -> None:
        nonlocal open_verifications
        open_verifications += 1
        dice = np.random.default_rng((seed, group.number, 1))
        late = FULL_MEDIAN_SECONDS * float(np.exp(FULL_SIGMA * dice.standard_normal()))
        await asyncio.sleep(late if mode == "full" else SURROGATE_SECONDS)
        ready.put_nowait(group)
        if mode == "corrected":
            await asyncio.sleep(late - SURROGATE_SECONDS)
            settled.put_nowait(group)
        open_verifications -= 1

    def issue(number: int) -> None:
        task = asyncio.create_task(verify(toy.sample(number)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    issued = 2 * GROUPS
    for number in range(issued):
        issue(number)
    for _ in range(STEPS):
        groups = [await ready.get() for _ in range(GROUPS)]
        reward = toy.full if mode == "full" else toy.surrogate
        batch = [(group, grpo_advantages(reward(group))) for group in groups]
        for group, advantages in batch:
            group.trained = advantages
        toy.step(batch, _corrections(toy, settled))
        curve.append((time.monotonic() - started, toy.reward()))
        for number in range(issued, min(issued + GROUPS, STEPS * GROUPS)):
            issue(number)
        issued += GROUPS
    while mode == "corrected" and (open_verifications or not settled.empty()):
        group = await settled.get()
        settled.put_nowait(group)
        if late := _corrections(toy, settled):
            toy.step([], late)
            curve.append((time.monotonic() - started, toy.reward()))
    if toy.dropped:
        print(f"{toy.dropped} of {STEPS * GROUPS} corrections came more than {POLICY.max_lag} versions late")
    return toy.reward(), time.monotonic() - started


def _corrections(toy: Toy, settled: "asyncio.Queue[Sampled]") -> list[tuple[Sampled, np.ndarray]]:
    """Correction samples of the groups whose full rewards have come."""
    late = []
    while not settled.empty():
        group = settled.get_nowait()
        known = Provisional(index=group.number, oldest_version=group.version, advantages_G=group.trained)
        change = correct(known, toy.full(group), toy.version, POLICY)
        if isinstance(change, str):
            toy.dropped += change == "too_old"
        else:
            late.append((group, change))
    return late


def plot(curves: dict[Mode, list[tuple[float, float]]], path: Path) -> None:
    """Full reward over wall time of one seed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "reflux", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.4))
    names: dict[Mode, str] = {
        "full": "waits for full rewards",
        "corrected": "surrogate at once, corrected later",
        "surrogate": "surrogate, never corrected",
    }
    for mode, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=names[mode], linewidth=1.6)
    axes.set(xlabel="wall time (s)", ylabel="full reward, greedy", ylim=(0, 1.05), xscale="log")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    modes: tuple[Mode, ...] = ("full", "corrected", "surrogate")
    rewards: dict[Mode, list[float]] = {mode: [] for mode in modes}
    seconds: dict[Mode, list[float]] = {mode: [] for mode in modes}
    curves: dict[Mode, list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        for mode in modes:
            curve: list[tuple[float, float]] = []
            reward, wall = asyncio.run(run(mode, seed, curve))
            rewards[mode].append(reward)
            seconds[mode].append(wall)
            curves.setdefault(mode, curve)
            print(f"seed {seed}: {mode:10} full reward {reward:.3f} after {wall:6.2f} s")
    if options.plot:
        plot(curves, options.plot)
    means = {mode: float(np.mean(values)) for mode, values in rewards.items()}
    found = {
        "late_final_gap": means["full"] - means["corrected"],
        "late_wall_ratio": float(np.mean(seconds["corrected"]) / np.mean(seconds["full"])),
        "late_uncorrected_gap": means["full"] - means["surrogate"],
    }
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
